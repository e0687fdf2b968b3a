"""A daemon that does what a test says: it welcomes agents and gives them real segments."""

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kvquota.native import Desired, DesiredWriter, DeviceRecord, Observed, ObservedReader, packet
from kvquota.native.status import Reason, Status

TIMEOUT = 10.0
Answer = Callable[["Connection"], None]


class Connection:
    """One agent that said hello."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any], record: DeviceRecord) -> None:
        self.sock = sock
        self.hello = hello
        self.record = record
        self.desired = DesiredWriter()
        self.observed = ObservedReader()

    def welcome(self, **changes: object) -> None:
        """Answer hello; `changes` make the welcome a wrong one. `fds`: other descriptors."""
        fds = changes.pop("fds", [self.desired.fileno(), self.observed.fileno(), self.record.fileno()])
        message = {"kind": "welcome", "version": 1, "boot_id": "boot", "device": "host", **changes}
        packet.send(self.sock, packet.encode(message), fds)  # type: ignore[arg-type]

    def refuse(self, code: str, message: str = "no") -> None:
        packet.send(self.sock, packet.encode({"kind": "refused", "code": code, "message": message}))

    def limit(self, limit_bytes: int | None, revision: int) -> None:
        self.desired.write(Desired(revision=revision, limit_bytes=limit_bytes))
        packet.ring(self.sock)

    def read(self) -> Observed:
        observed, fresh = self.observed.read()
        assert fresh
        return observed

    def standing(self) -> tuple[Status, Reason]:
        observed = self.read()
        return Status(observed.status), Reason(observed.reason)

    def wait(
        self, reached: Callable[[Observed], bool], step: Callable[[], object] = lambda: None
    ) -> Observed:
        """Wait for the agent's rings until `reached`. `step`: what makes an engine go on meanwhile."""
        end = time.monotonic() + TIMEOUT
        while not reached(observed := self.read()):
            assert time.monotonic() < end, f"not reached in {TIMEOUT} s: {show(observed)}"
            step()
            select.select([self.sock], [], [], 0.01)
            try:
                packet.receive(self.sock)
            except BlockingIOError:
                continue
        return observed

    def close(self) -> None:
        self.sock.close()
        self.desired.close()
        self.observed.close()


class FakeDaemon:
    """Listens at `path`. Each hello is answered by `answer`, a welcome unless the test says otherwise."""

    def __init__(self, path: Path, capacity: int = 1 << 40, answer: Answer = Connection.welcome) -> None:
        self.answer = answer
        self.record = DeviceRecord.create(capacity)
        self._came: queue.Queue[Connection] = queue.Queue()
        self._all: list[Connection] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._stop = os.eventfd(0)
        self._path = path
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def connection(self) -> Connection:
        """The next agent that said hello."""
        return self._came.get(timeout=TIMEOUT)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._stop, self._listener.fileno()], [], [])
            if self._stop in ready:
                return
            sock, _ = self._listener.accept()
            sock.settimeout(TIMEOUT)
            came = packet.receive(sock)
            if came is None:
                sock.close()
                continue
            sock.setblocking(False)
            connection = Connection(sock, packet.decode(came.payload), self.record)
            self._all.append(connection)
            self.answer(connection)
            self._came.put(connection)

    def close(self) -> None:
        """Die: every connection ends, and the socket file goes. May be called twice."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join(TIMEOUT)
        self._listener.close()
        self._path.unlink()
        for connection in self._all:
            connection.close()
        os.close(self._stop)
        self._stop = -1
        self.record.close()

    def __enter__(self) -> "FakeDaemon":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def show(observed: Observed) -> dict[str, object]:
    """All fields of a report, for a failed assertion."""
    return {name: getattr(observed, name) for name in dir(observed) if not name.startswith("_")}
