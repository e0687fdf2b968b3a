"""Models of an engine and of ranks, in plain Python: what a test says is what they do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvquota.agent.contract import Counters, PageCommand, RankFault, RankReport

MIB = 1 << 20
Kind = Literal["pinned", "evictable", "empty"]


class ModelAdapter:
    """Pages instead of blocks. `pages` holds those in circulation, least recently used first."""

    engine = "model 1"

    def __init__(self, floor: int = 0) -> None:
        self.pages: dict[int, Kind] = dict.fromkeys(range(floor), "pinned")
        self.floor = floor
        self.floor_is_used = False
        """Whether more than the null block is in use on it."""
        self.withheld: set[int] = set()
        self.draining: set[int] = set()
        self.allowed = 0
        self.fresh: list[int] = []
        self.wants = 0
        self.is_busy = False
        self.woken = 0

    def grow(self, count: int = 1, kind: Kind = "pinned") -> list[int]:
        pages = []
        for _ in range(count):
            assert self.allowed > 0, "the queue grows within what was allowed"
            self.allowed -= 1
            page = next(p for p in range(10_000) if p not in self.pages and p not in self.withheld)
            assert page >= self.floor, "the floor only comes back by put_floor"
            self.pages[page] = kind
            self.fresh.append(page)
            pages.append(page)
        return pages

    def become(self, kind: Kind, *pages: int) -> None:
        for page in pages:
            self.pages[page] = kind
            if kind != "pinned":
                self.draining.discard(page)

    def usage(self) -> tuple[int, int, int, int]:
        kinds = list(self.pages.values())
        return kinds.count("pinned"), kinds.count("evictable"), kinds.count("empty"), len(self.draining)

    def allow(self, pages: int) -> None:
        self.allowed = pages

    def grown(self) -> Sequence[int]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def take(self, pages: int) -> list[int]:
        order = [p for kind in ("empty", "evictable") for p, k in self.pages.items() if k == kind]
        taken = order[:pages]
        for page in taken:
            del self.pages[page]
        self.withheld.update(taken)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        assert self.withheld.issuperset(pages)
        self.withheld.difference_update(pages)

    def drain(self, pages: int) -> None:
        able = [p for p, kind in self.pages.items() if kind == "pinned"]
        order = sorted(able, key=lambda p: (p < self.floor, p not in self.draining))
        assert pages <= len(order)
        self.draining = set(order[:pages])

    def take_floor(self) -> list[int]:
        if self.floor_is_used:
            return []
        for page in range(self.floor):
            del self.pages[page]
        self.withheld.update(range(self.floor))
        self.draining.difference_update(range(self.floor))
        return list(range(self.floor))

    def put_floor(self) -> None:
        assert self.withheld.isdisjoint(range(self.floor))
        self.pages.update(dict.fromkeys(range(self.floor), "pinned"))

    def wanted(self) -> int:
        return self.wants

    def busy(self) -> bool:
        return self.is_busy

    def counters(self) -> Counters:
        return Counters()

    def wake(self) -> None:
        self.woken += 1


@dataclass
class ModelRank:
    """Does nothing until told: `create`, `refuse`, `serve_drops`, `finish`."""

    name: str = "rank 0"
    page_bytes: int = 2 * MIB
    lost: str | None = None
    asked: int = 0
    drop_wanted: int = 0
    state: RankReport = field(default_factory=RankReport)

    def ask(self, asked: int, dropped: int) -> None:
        assert asked >= self.asked
        assert dropped >= self.drop_wanted
        assert dropped <= asked
        self.asked, self.drop_wanted = asked, dropped

    @property
    def pending(self) -> int:
        return self.asked - self.state.created - self.state.refused

    def create(self, count: int | None = None) -> None:
        count = self.pending if count is None else count
        assert 0 <= count <= self.pending
        self.state = replace(self.state, created=self.state.created + count)

    def refuse(self) -> None:
        self.state = replace(self.state, refused=self.state.refused + self.pending)

    def serve_drops(self) -> None:
        owed = self.drop_wanted - self.state.dropped
        cancelled = min(owed, self.pending)
        unrefused = min(owed - cancelled, self.state.refused)
        self.state = replace(
            self.state,
            created=self.state.created + cancelled + unrefused,
            refused=self.state.refused - unrefused,
            dropped=self.drop_wanted,
        )

    def finish(self, command: PageCommand, *faults: RankFault) -> None:
        self.state = replace(self.state, done=command.seq, faults=(*self.state.faults, *faults))

    def mend(self) -> None:
        self.state = replace(self.state, faults=())

    def report(self) -> RankReport:
        return self.state

    def wait(self, created: int, timeout: float) -> None:
        assert timeout > 0
        self.create(max(0, min(self.pending, created - self.state.created)))

    def attach(self, record_fd: int) -> None:
        raise AssertionError(f"no device here for {record_fd}")

    def fileno(self) -> int:
        raise AssertionError("nobody polls a model")

    def ready(self) -> bool:
        raise AssertionError("nobody polls a model")

    def close(self) -> None:
        pass
