"""Who is at the other end of a Unix socket, as the kernel tells it, and who is let in."""

import errno
import os
import socket
import struct
from dataclasses import dataclass

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("iII")
_GROUP = struct.Struct("I")
_MAX_GROUPS = 256  # what Python's getsockopt has room for


@dataclass(frozen=True)
class Peer:
    """The process that connected. `pid` is 0 when it is not visible from here (another PID namespace)."""

    pid: int
    uid: int
    groups: frozenset[int]


@dataclass(frozen=True)
class Admission:
    """Which processes may join as engines: the daemon's own user, root, and those named here."""

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def problem(self, peer: Peer) -> str | None:
        """Why `peer` is refused; None when it is let in."""
        if peer.uid in {0, os.geteuid(), *self.users} or peer.groups & self.groups:
            return None
        return (
            f"uid {peer.uid} may not join: the daemon runs as uid {os.geteuid()}; "
            "allow the user with --agent-user or one of its groups with --agent-group"
        )


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end of `connection`. Raises OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return Peer(pid, uid, frozenset([gid, *_supplementary_groups(connection)]))


def _supplementary_groups(connection: socket.socket) -> list[int]:
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUP.size * _MAX_GROUPS)
    except OSError as problem:
        if problem.errno != errno.ERANGE:
            raise
        return []  # a user in more groups than that is let in by name or by its primary group
    return [group for (group,) in _GROUP.iter_unpack(groups)]


def open_pidfd(connection: socket.socket, peer: Peer) -> int:
    """A pidfd of the process at the other end, for the caller to close. Raises OSError when it is gone."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as problem:
        if problem.errno != errno.ENOPROTOOPT:
            raise
    # A kernel before 6.5. The pid is another's only if the peer has ended, which its connection tells.
    return os.pidfd_open(peer.pid)
