"""What an instance looks like. Pure: from its spec and its leader's report, which is not trusted."""

from dataclasses import dataclass
from typing import Any

from kvquota.daemon.spec import INT64_MAX, Spec
from kvquota.native import Observed
from kvquota.native.status import Reason, Status
from kvquota.v1 import quota_pb2 as pb

_MAX_PAGE_BYTES = 2**44
_COUNTERS = (
    "requests_waiting", "requests_blocked", "pages_mapped", "pages_unmapped", "blocks_evicted", "refused",
    "decided_at_ns", "applied_at_ns",
)  # fmt: skip
_PARTS = ("pinned_pages", "evictable_pages", "warm_pages", "retiring_pages", "quarantined_pages")
_MAX_RANKS = 2**20

# The generated types say int where a message wants the enumeration.
_STATUS: dict[Status, Any] = {status: pb.Status.Value(f"STATUS_{status.name}") for status in Status}
_REASON: dict[Reason, Any] = {reason: pb.Reason.Value(f"REASON_{reason.name}") for reason in Reason}

_DETAIL = {
    Reason.NONE: "",
    Reason.NOT_CONNECTED: "No engine is connected; the limit is kept for it.",
    Reason.WAITING_FOR_ENGINE: "The engine has not taken the limit up yet.",
    Reason.SHRINKING: "Pages are being given back.",
    Reason.PINNED_BY_RUNNING_REQUESTS: "Running requests hold more than the limit: it's reached as they end.",
    Reason.WAITING_FOR_RANKS: "Not every rank is done with the pages that go.",
    Reason.FLOOR: "Only the pages that the engine can't give up are left.",
    Reason.ENGINE_NOT_STEPPING: "Nothing steps the engine, and only a step can give pages back.",
    Reason.ENGINE_NOT_RESPONDING: "The engine has not answered the daemon's ring.",
    Reason.QUARANTINED_PAGES: "A driver call failed on pages; they are out of use and take memory.",
    Reason.RANK_LOST: "A rank is gone.",
    Reason.RANK_FAILED: "A rank failed.",
    Reason.SEGMENT_UNREADABLE: "The engine's report can't be read: these are its last good values.",
}

# What ends by itself once the engine steps.
_NEEDS_STEP = (
    Reason.WAITING_FOR_ENGINE,
    Reason.ENGINE_NOT_RESPONDING,
    Reason.SHRINKING,
    Reason.WAITING_FOR_RANKS,
)


@dataclass(frozen=True)
class Report:
    """What a leader says. `pid`: 0 if not visible. `fresh`: read just now. `answered`: no ring is overdue.

    `wakes`: whether the daemon's ring makes the engine step.
    """

    pid: int
    observed: Observed
    fresh: bool
    answered: bool
    wakes: bool = True


def view(spec: Spec, engine: str, report: Report | None) -> pb.Instance:
    """The instance for people and programs. `report`: None when no leader is connected."""
    instance = pb.Instance(
        name=spec.name,
        engine=engine,
        connected=report is not None,
        revision=spec.revision,
        limit_bytes=spec.limit_bytes,
        set_by=spec.set_by,
        set_at_unix_ns=spec.set_at_unix_ns,
    )
    if report is None:
        _judge(instance, Status.UNAVAILABLE, Reason.NOT_CONNECTED)
        return instance
    if report.pid:
        instance.pid = report.pid
    books = _Books(report.observed, spec.revision)
    books.fill(instance)
    instance.stale = not report.fresh
    status, reason, settled = _status(spec, report, books, instance)
    if not report.wakes and status is Status.DEFERRED and reason in _NEEDS_STEP:
        reason = Reason.ENGINE_NOT_STEPPING
    _judge(instance, status, reason)
    instance.settled = settled
    if books.problems:
        instance.detail = f"The engine's report is not plausible: {'; '.join(books.problems)}."
    return instance


def _judge(instance: pb.Instance, status: Status, reason: Reason) -> None:
    instance.status = _STATUS[status]
    instance.reason = _REASON[reason]
    instance.detail = _DETAIL[reason]


class _Books:
    """A report with every number in its range, and what had to be changed for that."""

    def __init__(self, observed: Observed, revision: int) -> None:
        self.problems: list[str] = []
        self._observed = observed
        self.page_bytes = self._number("page_bytes", _MAX_PAGE_BYTES)
        self.capacity = self._number("capacity_pages", INT64_MAX // max(1, self.page_bytes))
        self.floor = self._number("floor_pages", self.capacity)
        self.target = self._number("target_pages", self.capacity)
        self.parts = {name: self._number(name, self.capacity) for name in _PARTS}
        self.draining = self._number("draining_pages", self.parts["pinned_pages"])
        mapped = self._number("mapped_pages", self.capacity)
        # A busy leader refreshes the parts each step and the whole less often: believe the larger.
        self.mapped = max(mapped, min(sum(self.parts.values()), self.capacity))
        self.decided = self._number("revision_decided", revision)
        self.applied = self._number("revision_applied", self.decided)
        self.ranks = self._number("ranks", _MAX_RANKS)
        self.ranks_lost = self._number("ranks_lost", self.ranks)
        self.counters = {name: self._number(name, INT64_MAX) for name in _COUNTERS}
        self.status = self._status()
        self.reason = self._reason()

    def fill(self, instance: pb.Instance) -> None:
        """Put the numbers in bytes into `instance`, and what follows from them."""
        size = self.page_bytes
        instance.observed_revision = self.decided
        instance.page_bytes = size
        instance.capacity_bytes = self.capacity * size
        instance.target_bytes = self.target * size
        instance.mapped_bytes = self.mapped * size
        instance.pinned_bytes = self.parts["pinned_pages"] * size
        instance.draining_bytes = self.draining * size
        instance.evictable_bytes = self.parts["evictable_pages"] * size
        instance.warm_bytes = self.parts["warm_pages"] * size
        instance.retiring_bytes = self.parts["retiring_pages"] * size
        instance.quarantined_bytes = self.parts["quarantined_pages"] * size
        if size:
            limit = instance.limit_bytes if instance.HasField("limit_bytes") else INT64_MAX
            instance.effective_limit_bytes = min(limit, instance.capacity_bytes)
            instance.overage_bytes = max(0, instance.mapped_bytes - instance.effective_limit_bytes)
        instance.ranks = self.ranks
        instance.ranks_lost = self.ranks_lost
        instance.requests_waiting = self.counters["requests_waiting"]
        instance.requests_blocked = self.counters["requests_blocked"]
        instance.pages_mapped_total = self.counters["pages_mapped"]
        instance.pages_unmapped_total = self.counters["pages_unmapped"]
        instance.blocks_evicted_total = self.counters["blocks_evicted"]
        instance.allocations_refused_total = self.counters["refused"]
        if self.counters["decided_at_ns"]:
            instance.decided_monotonic_ns = self.counters["decided_at_ns"]
        if self.counters["applied_at_ns"]:
            instance.applied_monotonic_ns = self.counters["applied_at_ns"]

    def _number(self, name: str, most: int) -> int:
        value: int = getattr(self._observed, name)
        if 0 <= value <= most:
            return value
        self.problems.append(f"{name} is {value}, expected 0 to {most}")
        return max(0, min(value, most))

    def _status(self) -> Status:
        try:
            return Status(self._observed.status)
        except ValueError:
            self.problems.append(f"status is {self._observed.status}, which is none")
            return Status.UNAVAILABLE

    def _reason(self) -> Reason:
        try:
            return Reason(self._observed.reason)
        except ValueError:
            self.problems.append(f"reason is {self._observed.reason}, which is none")
            return Reason.NONE


def _status(spec: Spec, report: Report, books: _Books, instance: pb.Instance) -> tuple[Status, Reason, bool]:  # noqa: PLR0911
    """Status, reason and settled. `applied` is said only where memory bears it out."""
    if books.problems or not report.fresh:
        return Status.DEGRADED, Reason.SEGMENT_UNREADABLE, False
    if not books.page_bytes:
        if spec.revision == 0:
            return Status.APPLIED, Reason.NONE, True
        return Status.DEFERRED, Reason.WAITING_FOR_ENGINE, False
    if books.ranks_lost:
        return Status.DEGRADED, Reason.RANK_LOST, False
    status, reason = books.status, books.reason
    if books.decided < spec.revision:
        if status is Status.DEGRADED or reason is Reason.ENGINE_NOT_STEPPING:
            return status, reason, False
        waiting = Reason.WAITING_FOR_ENGINE if report.answered else Reason.ENGINE_NOT_RESPONDING
        return Status.DEFERRED, waiting, False
    retiring = books.parts["retiring_pages"]
    if status is Status.APPLIED and (books.applied < spec.revision or instance.overage_bytes or retiring):
        return Status.DEFERRED, Reason.WAITING_FOR_RANKS if retiring else Reason.SHRINKING, False
    if status is Status.UNAVAILABLE:
        # A leader that is connected and has decided, but says nothing of how it stands.
        return Status.DEFERRED, Reason.WAITING_FOR_ENGINE, False
    if status is Status.APPLIED:
        return status, Reason.NONE, True
    at_floor = (
        (status, reason) == (Status.DEFERRED, Reason.FLOOR) and books.mapped <= books.floor and not retiring
    )
    return status, reason, at_floor
