"""The daemon's two folders: one for its sockets, and one for the specs."""

import errno
import fcntl
import os
from pathlib import Path

from kvquota.daemon.errors import StartError

_MAX_SOCKET_PATH = 107
"""Bytes that a Unix socket's address holds, its closing zero not counted."""


def default_runtime_dir(name: str) -> Path:
    """Where daemon `name` serves its sockets unless told otherwise. Raises StartError."""
    if os.geteuid() == 0:
        return Path("/run/kvquota") / name
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if not folder:
        raise StartError("XDG_RUNTIME_DIR is not set: set it, or give --runtime-dir")
    return Path(folder) / "kvquota" / name


def default_state_dir(name: str) -> Path:
    """Where daemon `name` keeps its specs unless told otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvquota") / name
    folder = os.environ.get("XDG_STATE_HOME")
    return (Path(folder) if folder else Path.home() / ".local/state") / "kvquota" / name


class LockedFolder:
    """A folder that one daemon at a time uses: made if needed, and locked while this object is open.

    Raises StartError, naming the holder's pid, when another daemon has it.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path.absolute()
        try:
            self._make(mode)
            self._fd = self._lock()
        except OSError as problem:
            raise StartError(f"{self.path}: {problem.strerror}") from problem

    def close(self) -> None:
        """Let the next daemon in. Its lock file goes while the lock is still held."""
        self._lock_path.unlink(missing_ok=True)
        os.close(self._fd)

    def _make(self, mode: int) -> None:
        # Whatever the umask: others must reach the sockets, or must not see the specs.
        for folder in reversed([self.path, *self.path.parents]):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                folder.chmod(mode if folder == self.path else 0o755)

    @property
    def _lock_path(self) -> Path:
        return self.path / "lock"

    def _lock(self) -> int:
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                if problem.errno != errno.EWOULDBLOCK:
                    raise
                raise StartError(f"{self.path} is in use by the daemon with pid {holder}") from problem
            if self._is_current(fd):
                os.ftruncate(fd, 0)
                os.write(fd, f"{os.getpid()}\n".encode())
                return fd
            # The holder stopped in between and took its lock file away: ours is a file without a name.
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._lock_path.stat())
        except FileNotFoundError:
            return False


class RuntimeDirectory(LockedFolder):
    """The folder with the daemon's sockets, on whose lock everything else waits."""

    def __init__(self, path: Path) -> None:
        self.control = path.absolute() / "control.sock"
        self.read = path.absolute() / "read.sock"
        self.agent = path.absolute() / "agent.sock"
        longest = max((len(os.fsencode(socket)), socket) for socket in self.sockets)
        if longest[0] > _MAX_SOCKET_PATH:
            raise StartError(
                f"{longest[1]} is {longest[0]} bytes long, and a socket's path can have {_MAX_SOCKET_PATH}: "
                "give a shorter --runtime-dir"
            )
        if "," in str(self.control):
            # A client of gRPC takes it for the end of one address and the start of the next.
            raise StartError(f"{self.control} has a comma: give a --runtime-dir without")
        # Everyone may look: who may do what is the mode of each socket.
        super().__init__(path, 0o755)

    @property
    def sockets(self) -> tuple[Path, Path, Path]:
        """All that the daemon serves here."""
        return self.control, self.read, self.agent

    def remove_sockets(self) -> None:
        """Remove sockets, stale or our own. Raises StartError for a path that is something else."""
        for path in filter(os.path.lexists, self.sockets):
            if not path.is_socket():
                raise StartError(f"{path} is not a socket: move it away")
            path.unlink()
