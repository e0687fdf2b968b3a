"""Cut a connection of another process, as a network would: without a word to either end."""

import ctypes
import os
import socket
from contextlib import closing, suppress
from pathlib import Path

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut(pid: int, path: Path) -> int:
    """Shut down every socket of `pid` that is connected to `path`. Returns how many there were."""
    pidfd = os.pidfd_open(pid)
    found = 0
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError), closing(_copy(pidfd, int(entry.name))) as sock:
                if sock.getpeername() == os.fspath(path):
                    sock.shutdown(socket.SHUT_RDWR)
                    found += 1
    finally:
        os.close(pidfd)
    return found


def _copy(pidfd: int, fd: int) -> socket.socket:
    """A copy of another process's socket. Raises OSError where it is none, or is closed meanwhile."""
    copied = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copied < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_getfd of descriptor {fd}")
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise
