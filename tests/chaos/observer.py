"""Looks on from outside: what the daemon says of an engine, against what the kernel counts behind it."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
from kvquota.v1 import quota_pb2 as pb

from tests.chaos.subject import Subject
from tests.support.daemon import DaemonProcess

_GAP_S = 0.005
_CALL_S = 5.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Observer:
    """Checks an instance again and again on a thread of its own, and at once when told to `look`.

    It remembers the limit of every revision and what each engine has decided: neither may change its mind.
    """

    def __init__(self, daemon: DaemonProcess, subject: Subject, log: Callable[[str], None]) -> None:
        self.faults: list[str] = []
        self.looks = self.proofs = 0
        """How often it looked, and how often `applied` was held against the kernel's count."""
        self._daemon = daemon
        self._subject = subject
        self._log = log
        self._lock = threading.Lock()
        self._limits: dict[int, int | None] = {}
        self._revision = 0
        self._decided: dict[int, int] = {}  # by pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer")

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def was_told(self, stub: Any, answer: pb.Instance) -> None:
        """A controller was told this just now: is it so?"""
        self._check_limit(answer)
        held = self._held(answer)
        if held is not None:
            self._look(stub, lambda now: self._check_held(answer, held, now))

    def look(self) -> None:
        """Check now, if the daemon is there."""
        with self._daemon.stub("read") as stub:
            self._look(stub)

    def _run(self) -> None:
        while not self._stop.is_set():
            # A channel for each daemon: one that lost its daemon pauses before it tries again.
            with self._daemon.stub("read") as stub:
                while not self._stop.wait(_GAP_S) and self._look(stub):
                    pass

    def _look(self, stub: Any, check: Callable[[pb.Instance], None] | None = None) -> bool:
        """Check now; False where the daemon is away. `check` has a look at what it says, too."""
        request = pb.GetInstanceRequest(name=self._subject.instance)
        # One look at a time: two would not know in which order their answers were made.
        with self._lock:
            try:
                first: pb.Instance = stub.GetInstance(request, timeout=_CALL_S)
                if check is not None:
                    check(first)
                held = self._held(first)
                second: pb.Instance = stub.GetInstance(request, timeout=_CALL_S)
            except grpc.RpcError as error:
                self._check(error.code() in _AWAY, f"GetInstance fails: {error.code()}, {error.details()}")
                return False
            self.looks += 1
            self._check_instance(first)
            self._check_instance(second)
            if held is not None:
                self._check_held(first, held, second)
        return True

    def _held(self, now: pb.Instance) -> int | None:
        """What the kernel counts behind an engine that should hold no more than its limit."""
        if now.status != pb.STATUS_APPLIED or not now.pid or not now.page_bytes:
            return None
        try:
            return self._subject.held_bytes(now.pid)
        except (FileNotFoundError, ProcessLookupError):  # killed meanwhile
            return None

    def _check_held(self, before: pb.Instance, held: int, after: pb.Instance) -> None:
        """`held` bytes were counted between two looks: if nothing was set in between, `applied` held."""
        if (before.pid, before.revision, before.status) != (after.pid, after.revision, after.status):
            return
        self.proofs += 1
        most = before.effective_limit_bytes
        self._check(held <= most, f"{held} bytes are held under an applied limit of {most}: {before}")

    def _check_instance(self, now: pb.Instance) -> None:
        self._check(now.revision >= self._revision, f"revision {now.revision} after {self._revision}")
        self._revision = max(self._revision, now.revision)
        self._check_limit(now)
        if not now.connected or not now.page_bytes:
            return
        decided = self._decided.get(now.pid, 0)
        self._check(now.observed_revision >= decided, f"decided {now.observed_revision} after {decided}")
        self._decided[now.pid] = max(decided, now.observed_revision)
        self._check(now.observed_revision <= now.revision, f"decided before it was set: {now}")
        self._check("plausible" not in now.detail, f"{now}")
        if now.stale:
            return
        parts = now.pinned_bytes + now.evictable_bytes + now.warm_bytes
        parts += now.retiring_bytes + now.quarantined_bytes
        self._check(parts == now.mapped_bytes <= now.capacity_bytes, f"{parts} bytes in parts: {now}")
        self._check(now.status != pb.STATUS_DEGRADED, f"degraded, and nothing broke: {now}")
        if now.status == pb.STATUS_APPLIED:
            going = now.overage_bytes or now.retiring_bytes
            self._check(
                now.observed_revision == now.revision and not going, f"applied is said too early: {now}"
            )

    def _check_limit(self, now: pb.Instance) -> None:
        said = now.limit_bytes if now.HasField("limit_bytes") else None
        limit = self._limits.setdefault(now.revision, said)
        self._check(said == limit, f"revision {now.revision} has two limits: {limit} and {said}")

    def _check(self, holds: bool, fault: str) -> None:
        if not holds:
            self._log(f"FAULT {fault}")
            self.faults.append(fault)
