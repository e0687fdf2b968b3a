"""The link between a leader and a rank in another process, and the leader's end of it."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from kvquota.agent.contract import RankFault, RankReport
from kvquota.agent.fork import close_in_children
from kvquota.agent.geometry import Geometry
from kvquota.native import packet

LINK_VERSION = 1
_CREDENTIALS = struct.Struct("3i")
_CONNECT_RETRY_S = 0.02
# More than there are driver calls that can fail for a page, or for none.
_FAULTS_A_PAGE = 8

_log = logging.getLogger(__name__)


class RankLinkError(Exception):
    """A rank that cannot be reached, or that does not fit. The message names it and what was expected."""


def rank_address(instance_id: str, rank: int) -> str:
    """The abstract socket address of a rank. `instance_id`: random, known to the leader and its ranks."""
    return f"\0kvquota/{instance_id}/rank/{rank}"


def check_peer(sock: socket.socket) -> int:
    """The pid of the peer. Raises PermissionError where it is another user's process."""
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if uid != os.getuid():
        raise PermissionError(f"process {pid} of uid {uid} is at the other end: expected uid {os.getuid()}")
    return int(pid)


class RemoteRank:
    """A rank in another process. What it says is read by the watcher, and kept for the engine thread."""

    def __init__(self, address: str, name: str, geometry: Geometry, timeout: float) -> None:
        """Connect within `timeout` seconds. Raises RankLinkError."""
        self.name = name
        self.lost: str | None = None
        self._changed = threading.Condition()
        self._report = RankReport()
        self._faults: dict[tuple[int, str], RankFault] = {}
        self._most_faults = _FAULTS_A_PAGE * (geometry.pages + 1)
        self._unsent: bytes | None = None
        deadline = time.monotonic() + timeout
        self._sock = self._connect(address, deadline)
        try:
            self.pid = check_peer(self._sock)
            self.page_bytes = self._greet(geometry, deadline)
        except BaseException:
            self._sock.close()
            raise

    def ask(self, asked: int, dropped: int) -> None:
        """See Rank."""
        self._send(packet.encode({"kind": "ask", "asked": asked, "dropped": dropped}))

    def report(self) -> RankReport:
        """See Rank."""
        if self._unsent is not None:
            self._send(self._unsent)
        return self._report

    def wait(self, created: int, timeout: float) -> None:
        """See Rank."""
        refused = self._report.refused

        def answered() -> bool:
            report = self._report
            return report.created >= created or report.refused > refused or self.lost is not None

        with self._changed:
            self._changed.wait_for(answered, timeout)

    def attach(self, record_fd: int) -> None:
        """See Rank. Raises OSError where the link is full or gone."""
        packet.send(self._sock, packet.encode({"kind": "record"}), [record_fd])

    def fileno(self) -> int:
        """See Rank."""
        return self._sock.fileno()

    def ready(self) -> bool:
        """See Rank."""
        cause = None
        try:
            while (came := packet.receive(self._sock)) is not None:
                self._read(packet.decode(came.payload))
        except BlockingIOError:
            return True
        except (OSError, packet.PacketError) as error:
            cause = f"{self.name} (pid {self.pid}): {error}"
        with self._changed:
            self.lost = cause or f"{self.name} (pid {self.pid}) is gone"
            self._changed.notify_all()
        _log.error("kvquota: %s", self.lost)
        return False

    def close(self) -> None:
        """See Rank."""
        self._sock.close()

    def _connect(self, address: str, deadline: float) -> socket.socket:
        while True:
            sock = close_in_children(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            )
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                # A rank that starts late does not listen yet.
                if not isinstance(error, ConnectionRefusedError) or time.monotonic() >= deadline:
                    raise RankLinkError(f"cannot reach {self.name} at {address!r}: {error}") from error
                time.sleep(_CONNECT_RETRY_S)
            else:
                return sock

    def _greet(self, geometry: Geometry, deadline: float) -> int:
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            came = packet.receive(self._sock)
            if came is None:
                raise packet.PacketError("it hung up")
            hello = packet.decode(came.payload)
            version = packet.integer(hello, "version")
            if hello["kind"] != "hello" or version != LINK_VERSION:
                raise packet.PacketError(
                    f"{hello['kind']!r} of version {version}: expected hello of {LINK_VERSION}"
                )
            theirs = Geometry(*(packet.integer(hello, key, 1) for key in ("unit", "span", "blocks")))
            page_bytes = packet.integer(hello, "page_bytes", 1)
        except (OSError, packet.PacketError) as error:
            raise RankLinkError(f"no hello from {self.name} (pid {self.pid}): {error}") from error
        if theirs != geometry:
            raise RankLinkError(f"{self.name} (pid {self.pid}) has {theirs}: expected {geometry}")
        self._sock.setblocking(False)
        return page_bytes

    def _send(self, payload: bytes) -> None:
        # Asks are cumulative, so the newest makes up for all that could not be sent.
        self._unsent = None
        try:
            packet.send(self._sock, payload)
        except BlockingIOError:
            self._unsent = payload
        except OSError as error:
            # The watcher will see the hang-up, and then says why the rank is lost.
            _log.warning("kvquota: cannot ask %s: %s", self.name, error)

    def _read(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        # What faults change counts with the report that always follows.
        if kind == "fault":
            fault = RankFault(
                packet.integer(message, "seq"),
                packet.integer(message, "page", -1),
                packet.text(message, "operation"),
                packet.integer(message, "code", -(2**31)),
                packet.text(message, "name"),
            )
            self._faults[fault.page, fault.operation] = fault
            if len(self._faults) > self._most_faults:
                raise packet.PacketError(f"{fault} is one fault too many: expected {self._most_faults}")
        elif kind == "mended":
            key = packet.integer(message, "page", -1), packet.text(message, "operation")
            if self._faults.pop(key, None) is None:
                raise packet.PacketError(f"{key} is mended: expected a fault that was told")
        elif kind == "report":
            self._read_report(message)
        else:
            raise packet.PacketError(f"a packet of kind {kind!r}: expected report, fault or mended")

    def _read_report(self, message: Mapping[str, Any]) -> None:
        old = self._report
        new = RankReport(
            packet.integer(message, "done"),
            packet.integer(message, "created"),
            packet.integer(message, "refused"),
            packet.integer(message, "dropped"),
            packet.integer(message, "quarantined_credits"),
            tuple(self._faults.values()),
        )
        if new.done < old.done or new.created < old.created or new.dropped < old.dropped:
            raise packet.PacketError(f"{new} after {old}: counts only grow")
        with self._changed:
            self._report = new
            self._changed.notify_all()
