"""A rank's end of the link to its leader: a thread that passes on what the leader asks and the arena says."""

import logging
import os
import select
import socket
import threading

from kvquota.agent.contract import RankFault, RankReport
from kvquota.agent.fork import close_in_children
from kvquota.agent.geometry import Geometry
from kvquota.agent.local_rank import drain, rank_report
from kvquota.agent.rank_link import LINK_VERSION, check_peer
from kvquota.native import Arena, DriverError, HostDriver, packet

_JOIN_S = 2.0

_log = logging.getLogger(__name__)


class RankServer:
    """Serves one leader at a time until closed. A leader that breaks the protocol is hung up on."""

    def __init__(
        self, arena: Arena, geometry: Geometry, address: str, driver: HostDriver | None = None
    ) -> None:
        """Listen at `address` and start the thread. Raises OSError where the address is taken."""
        self._arena = arena
        self._geometry = geometry
        self._driver = driver
        self._leader: socket.socket | None = None
        self._told: RankReport | None = None
        self._told_faults: dict[tuple[int, str], RankFault] = {}
        self._full = False
        self._listener = _socket()
        try:
            self._listener.bind(address)
            self._listener.listen(4)
        except BaseException:
            self._listener.close()
            raise
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvquota-rank", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up and stop the thread; may be called twice. Raises TimeoutError where it does not end."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the rank's thread did not stop within {_JOIN_S:.0f} s")
        self._listener.close()
        self._hang_up()
        os.close(self._stop)
        self._stop = -1

    def _run(self) -> None:
        while True:
            poller = select.poll()
            for fd in (self._stop, self._listener.fileno(), self._arena.fileno()):
                poller.register(fd, select.POLLIN)
            if self._leader is not None:
                poller.register(self._leader, select.POLLIN | (select.POLLOUT if self._full else 0))
            ready = {fd for fd, _ in poller.poll()}
            if self._stop in ready:
                return
            if self._arena.fileno() in ready:
                drain(self._arena)
            if self._leader is not None:
                self._serve(self._leader, self._leader.fileno() in ready)
            if self._listener.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        try:
            sock = close_in_children(self._listener.accept()[0])
        except OSError as error:
            _log.warning("kvquota: a leader did not get through: %s", error)
            return
        sock.setblocking(False)
        try:
            pid = check_peer(sock)
            if self._leader is not None:
                raise PermissionError(f"process {pid} came while another leads")
            geometry = self._geometry
            hello = {
                "kind": "hello",
                "version": LINK_VERSION,
                "unit": geometry.unit,
                "span": geometry.span,
                "blocks": geometry.blocks,
                "page_bytes": self._arena.page_bytes,
            }
            packet.send(sock, packet.encode(hello))
        except OSError as error:
            _log.warning("kvquota: no leader: %s", error)
            sock.close()
            return
        self._leader, self._told, self._told_faults, self._full = sock, None, {}, False
        self._serve(sock, readable=False)

    def _serve(self, leader: socket.socket, readable: bool) -> None:
        try:
            if readable and not self._listen(leader):
                raise ConnectionResetError
            self._tell(leader)
        except BlockingIOError:
            self._full = True
        except (BrokenPipeError, ConnectionResetError):
            _log.info("kvquota: the leader is gone")
            self._hang_up()
        except (OSError, ValueError, DriverError) as error:
            _log.warning("kvquota: hanging up on the leader: %s", error)
            self._hang_up()

    def _listen(self, leader: socket.socket) -> bool:
        while True:
            try:
                came = packet.receive(leader, max_fds=1)
            except BlockingIOError:
                return True
            if came is None:
                return False
            try:
                self._read(came)
            finally:
                for fd in came.fds:
                    os.close(fd)

    def _read(self, came: packet.Packet) -> None:
        message = packet.decode(came.payload)
        kind = message["kind"]
        if kind == "ask":
            asked, dropped = packet.integer(message, "asked"), packet.integer(message, "dropped")
            if dropped > asked:
                raise packet.PacketError(
                    f"ask {asked}, dropped {dropped}: expected no more dropped than asked"
                )
            self._arena.ask(asked, dropped)
        elif kind == "record" and len(came.fds) == 1:
            if self._driver is not None:
                self._driver.attach(came.fds[0])
        else:
            raise packet.PacketError(
                f"{kind!r} with {len(came.fds)} descriptors: expected ask, or record with one"
            )

    def _tell(self, leader: socket.socket) -> None:
        report = rank_report(self._arena.report())
        # Faults first: when a report says that a command is over, its faults are known.
        faults = {(fault.page, fault.operation): fault for fault in report.faults}
        for key, fault in faults.items():
            if self._told_faults.get(key) != fault:
                packet.send(leader, packet.encode({"kind": "fault", **vars(fault)}))
                self._told_faults[key] = fault
        for key in self._told_faults.keys() - faults.keys():
            page, operation = key
            packet.send(leader, packet.encode({"kind": "mended", "page": page, "operation": operation}))
            del self._told_faults[key]
        if report != self._told:
            counts = {key: value for key, value in vars(report).items() if key != "faults"}
            packet.send(leader, packet.encode({"kind": "report", **counts}))
            self._told = report
        self._full = False

    def _hang_up(self) -> None:
        if self._leader is not None:
            self._leader.close()
            self._leader = None


def _socket() -> socket.socket:
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    return close_in_children(socket.socket(socket.AF_UNIX, kind))
