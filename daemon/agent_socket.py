"""agent.sock: lets leaders in. Whoever connects is checked, and gets a few seconds to say who it is."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvquota.daemon import log
from kvquota.daemon.agent_link import AgentLink
from kvquota.daemon.hello import Hello, RefusedError, read_hello, refused
from kvquota.daemon.peer import Admission, Peer, open_pidfd, peer_of
from kvquota.daemon.registry import Registry
from kvquota.native import packet

HELLO_TIMEOUT = 5.0
"""Seconds that a connection may be silent."""
MAX_PENDING = 64
"""Connections that have not said hello. For one more the oldest goes: a leader says hello at once."""
_ACCEPTS_AT_ONCE = 32
_ACCEPT_PAUSE = 1.0


class AgentSocket:
    """Listens on `path`, for every user: who may join is decided by what the kernel says of the peer."""

    def __init__(self, path: Path, admission: Admission, registry: Registry) -> None:
        self._admission = admission
        self._registry = registry
        self._pending: dict[_Pending, None] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(os.fspath(path))
        path.chmod(0o666)
        self._listener.listen(128)
        self._resume: asyncio.TimerHandle | None = None
        self._listen()

    async def close(self) -> None:
        """Let nobody in any more."""
        if self._resume is not None:
            self._resume.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for pending in list(self._pending):
            pending.close()
        await asyncio.gather(*self._joining)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            for _ in range(_ACCEPTS_AT_ONCE):
                self._admit(self._listener.accept()[0])
        except BlockingIOError:
            return
        except OSError as problem:
            # Out of descriptors, say. The listener stays readable: look again later instead of spinning.
            log.error("accept_failed", reason=problem)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._resume = loop.call_later(_ACCEPT_PAUSE, self._listen)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            peer = peer_of(connection)
            if problem_text := self._admission.problem(peer):
                _refuse(connection, peer, RefusedError("not_allowed", problem_text))
                return
            pidfd = open_pidfd(connection, peer)
        except OSError as problem:
            connection.close()
            log.warning("refused", code="gone", reason=problem)
            return
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            oldest.refuse(RefusedError("too_many", f"silent the longest of {MAX_PENDING} connections"))
        pending = _Pending(connection, pidfd, peer, self._said_hello, self._pending.pop)
        self._pending[pending] = None

    def _said_hello(self, link: AgentLink, connection: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._join(link, connection))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _join(self, link: AgentLink, connection: socket.socket) -> None:
        try:
            await self._registry.join(link)
        except RefusedError as refusal:
            _tell(connection, link.peer, refusal)
            link.close()
        except OSError as problem:
            log.warning("refused", pid=link.peer.pid, code="gone", reason=problem)
            link.close()


class _Pending:
    """A connection that has not said hello. It ends as a link, or refused."""

    def __init__(
        self,
        connection: socket.socket,
        pidfd: int,
        peer: Peer,
        said_hello: Callable[[AgentLink, socket.socket], None],
        ended: Callable[["_Pending"], None],
    ) -> None:
        self._connection = connection
        self._pidfd = pidfd
        self._peer = peer
        self._said_hello = said_hello
        self._ended = ended
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._receive)
        silent = RefusedError("bad_hello", f"no hello within {HELLO_TIMEOUT:g} s")
        self._timer = loop.call_later(HELLO_TIMEOUT, self.refuse, silent)

    def refuse(self, refusal: RefusedError) -> None:
        self._let_go()
        os.close(self._pidfd)
        _refuse(self._connection, self._peer, refusal)

    def close(self) -> None:
        self._let_go()
        os.close(self._pidfd)
        self._connection.close()

    def _receive(self) -> None:
        try:
            received = packet.receive(self._connection)
            if received is None:
                log.warning("refused", pid=self._peer.pid, code="gone", reason="hung up without a hello")
                self.close()
                return
            hello = read_hello(received.payload)
        except BlockingIOError:
            return
        except (packet.PacketError, OSError) as problem:
            self.refuse(RefusedError("bad_hello", str(problem)))
            return
        except RefusedError as refusal:
            self.refuse(refusal)
            return
        self._let_go()
        self._become_link(hello)

    def _become_link(self, hello: Hello) -> None:
        try:
            link = AgentLink(self._connection, self._pidfd, self._peer, hello)
        except OSError as problem:
            os.close(self._pidfd)
            refusal = RefusedError("too_many", f"no segments: {problem.strerror}")
            _refuse(self._connection, self._peer, refusal)
            return
        self._said_hello(link, self._connection)

    def _let_go(self) -> None:
        self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._connection)
        self._ended(self)


def _refuse(connection: socket.socket, peer: Peer, refusal: RefusedError) -> None:
    _tell(connection, peer, refusal)
    connection.close()


def _tell(connection: socket.socket, peer: Peer, refusal: RefusedError) -> None:
    log.warning("refused", pid=peer.pid, uid=peer.uid, code=refusal.code, reason=refusal)
    try:
        packet.send(connection, refused(refusal))
        # Closed with packets unread, the peer would see an error in place of the refusal.
        connection.shutdown(socket.SHUT_RDWR)
        while connection.recv(1):
            pass
    except OSError as problem:
        log.warning("refusal_not_read", pid=peer.pid, reason=problem)
