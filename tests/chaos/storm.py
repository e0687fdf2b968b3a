"""One run: limits from two controllers, kills, stops and cut connections under load, all from one seed."""

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import grpc
from kvquota.v1 import quota_pb2 as pb

from tests.chaos.load import Load
from tests.chaos.observer import Observer
from tests.chaos.sockets import cut
from tests.chaos.subject import Subject
from tests.support.daemon import DaemonProcess, FakeAgent, until

_CALL_S = 5.0
_JUNK = (b"!", b"{", b"[" * 4000, b'{"kind":"hello"}', b'{"kind":"hello","min_version":7,"max_version":9}')
_BOOKS = (
    "page_bytes",
    "capacity_pages",
    "target_pages",
    "mapped_pages",
    "pinned_pages",
    "revision_applied",
    "status",
)
_LIES = (-(2**63), -1, 0, 1, 7, 2**31, 2**63 - 1)
# What a controller may be told: the daemon is away, or the other one was faster.
_EXPECTED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
)


class Storm:
    """`seed` decides every limit, event and pause; what the machine does in between is its own."""

    def __init__(self, daemon: DaemonProcess, subject: Subject, seed: int) -> None:
        self.faults: list[str] = []
        self.counts = Counter[str]()
        self._daemon = daemon
        self._subject = subject
        self._seed = seed
        self._random = random.Random(seed)
        self._done = threading.Event()
        self._load = Load(subject, seed)
        subject.start()
        self._start = time.monotonic()
        # A daemon forgets a name that it has never written down.
        daemon.set(subject.instance, None)
        self._descriptors = _descriptors(daemon.pid)
        self._observer = Observer(daemon, subject, self._log)

    def run(self, seconds: float) -> None:
        """Storm for so long, then let it calm down. `faults` then holds all that was wrong."""
        load = self._load
        with ExitStack() as stack:
            stack.enter_context(self._observer)
            stack.enter_context(load)
            controllers = [threading.Thread(target=self._control, args=(n,)) for n in range(2)]
            for controller in controllers:
                controller.start()
            end = time.monotonic() + seconds
            try:
                while time.monotonic() < end:
                    self._happen()
                    self._observer.look()
                    time.sleep(self._random.uniform(0.05, 0.4))
            finally:
                self._done.set()
                for controller in controllers:
                    controller.join()
            load.stop()
            self._calm()
        until("every descriptor to be closed", lambda: _descriptors(self._daemon.pid) <= self._descriptors)
        self.faults += load.faults + self._observer.faults
        self.counts.update(
            served=load.served,
            lost=load.lost,
            hung_up=load.hung_up,
            looks=self._observer.looks,
            proofs=self._observer.proofs,
        )

    # Events

    def _happen(self) -> None:
        events: list[Callable[[], None]] = [
            self._kill_daemon, self._stop_daemon, self._pause_daemon,
            self._pause_engine, self._cut, self._cut, self._pester, self._lie,
            *self._subject.events(),
        ]  # fmt: skip
        event = self._random.choice(events)
        self._log(event.__name__.strip("_"))
        self.counts[event.__name__.strip("_")] += 1
        event()

    def _kill_daemon(self) -> None:
        self._daemon.kill()
        time.sleep(self._random.choice([0.0, 0.0, 0.3]))
        self._daemon.start()

    def _stop_daemon(self) -> None:
        if (status := self._daemon.stop()) != 0:
            self.faults.append(f"the daemon ends with {status} at SIGTERM")
        self._daemon.start()

    def _pause_daemon(self) -> None:
        _pause(self._daemon.pid, self._random.uniform(0.0, 0.5))

    def _pause_engine(self) -> None:
        _pause(self._subject.pid, self._random.uniform(0.0, 0.5))

    def _cut(self) -> None:
        cut(self._subject.pid, self._daemon.agent_socket)

    def _pester(self) -> None:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock:
            sock.connect(str(self._daemon.agent_socket))
            sock.send(self._random.choice(_JUNK))

    def _lie(self) -> None:
        """A leader whose report is nonsense."""
        with FakeAgent(self._daemon.agent_socket) as liar:
            liar.hello(
                "liar", revision=self._random.randrange(100), limit_bytes=self._random.choice([None, 5])
            )
            for _ in range(20):
                lies: dict[str, Any] = {name: self._random.choice(_LIES) for name in _BOOKS}
                liar.publish(ring=True, **lies)
                said = self._daemon.get("liar")
                if said.status == pb.STATUS_APPLIED and said.mapped_bytes > said.effective_limit_bytes:
                    self.faults.append(f"a lie is believed: {lies}, {said}")

    # Controllers

    def _control(self, number: int) -> None:
        source = random.Random(self._seed * 10 + number)
        known: int | None = None
        while not self._done.is_set():
            # A channel for each daemon: one that lost its daemon pauses before it tries again.
            with self._daemon.stub() as stub:
                while not self._done.wait(source.uniform(0.02, 0.08)):
                    limit = self._any_limit(source)
                    request = pb.SetLimitRequest(name=self._subject.instance, limit_bytes=limit, create=True)
                    request.wait = source.random() < 0.5
                    request.wait_timeout_ms = source.randrange(200)
                    if known is not None and source.random() < 0.3:
                        request.expected_revision = known
                    try:
                        now = stub.SetLimit(request, timeout=_CALL_S).instance
                    except grpc.RpcError as error:
                        known = None
                        if error.code() not in _EXPECTED:
                            self.faults.append(f"SetLimit fails: {error.code()}, {error.details()}")
                        if error.code() != grpc.StatusCode.ABORTED:
                            break
                    else:
                        known = now.revision
                        self._observer.was_told(stub, now)
                        self.counts["limits"] += 1

    def _any_limit(self, source: random.Random) -> int | None:
        """From nothing to more than there is, most often a few pages."""
        if source.random() < 0.1:
            return None
        most = source.choice([4.0, 12.0, self._subject.pages + 8.0])
        return int(most * source.random() * self._subject.page_bytes)

    # The end

    def _calm(self) -> None:
        """With everybody there and nothing more to come, everything converges."""
        subject = self._subject
        until("the engine to join", self._joined)
        self._settle(None)
        self._load.drain()
        for pages in (3.0, 0.5, 0.0, 7.0):
            self._log(f"calm, {pages} pages")
            now = self._settle(int(pages * subject.page_bytes))
            expected = pb.STATUS_APPLIED if pages >= subject.floor else pb.STATUS_DEFERRED
            if now.status != expected:
                self.faults.append(f"not so in the end: {now}")
        until("what the engine says and what the kernel counts to agree", self._agree)
        self.faults += subject.books()

    def _joined(self) -> bool:
        with self._daemon.stub("read") as stub:
            instances = stub.ListInstances(pb.ListInstancesRequest(), timeout=_CALL_S).instances
        return any(now.name == self._subject.instance and now.connected for now in instances)

    def _settle(self, limit: int | None) -> pb.Instance:
        """Set a limit and wait until it is settled."""
        answer = self._daemon.set(self._subject.instance, limit, wait=True)
        if answer.timed_out or not answer.instance.settled:
            self.faults.append(f"{limit} is not settled: {answer}")
        return answer.instance

    def _agree(self) -> bool:
        subject = self._subject
        mapped: int = self._daemon.get(subject.instance).mapped_bytes
        return mapped == subject.held_bytes(subject.pid) <= 7 * subject.page_bytes

    def _log(self, what: str) -> None:
        print(f"{time.monotonic() - self._start:8.3f} {what}", flush=True)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
