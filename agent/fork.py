"""Sockets that a forked child must not keep open: the peer would not learn that this process is gone."""

import os
import socket
from weakref import WeakSet

_sockets: "WeakSet[socket.socket]" = WeakSet()


def close_in_children(sock: socket.socket) -> socket.socket:
    """Have `sock` closed in every child that this process forks from now on. Returns it."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_all)
