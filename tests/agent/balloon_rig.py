"""A balloon between a model engine and model ranks."""

from kvquota.agent.balloon import Balloon
from kvquota.agent.contract import PageCommand
from kvquota.native.status import Reason, Status

from tests.agent.model import MIB, ModelAdapter, ModelRank

PAGES = 16
LONG_NS = 10**9


class Rig:
    """With a clock that only the test moves."""

    def __init__(self, ranks: int = 1, floor: int = 0, reserve: int = 0) -> None:
        self.now = 1
        self.adapter = ModelAdapter(floor)
        self.ranks = [ModelRank(f"rank {i}") for i in range(ranks)]
        for rank in self.ranks:
            rank.asked = floor
            rank.create(floor)
        self.page_bytes = 2 * MIB * ranks
        self.balloon = Balloon(
            self.adapter,
            self.ranks,
            pages=PAGES,
            floor=floor,
            reserve_bytes=reserve * self.page_bytes,
            clock=lambda: self.now,
        )
        self.revision = 0

    def limit(self, pages: int | None) -> None:
        self.revision += 1
        self.balloon.set_limit(None if pages is None else pages * self.page_bytes, self.revision)

    def step(self) -> PageCommand | None:
        self.balloon.reconcile(LONG_NS)
        return self.balloon.end_step(self.adapter.grown())

    def finish(self, command: PageCommand | None) -> None:
        assert command is not None
        for rank in self.ranks:
            rank.finish(command)

    def create(self) -> None:
        for rank in self.ranks:
            rank.serve_drops()
            rank.create()

    def fill(self, pages: int, kind: str = "evictable") -> list[int]:
        """Have `pages` mapped and of one kind, every rank done."""
        self.adapter.wants = pages
        self.balloon.settle()
        self.create()
        self.balloon.settle()
        grown = self.adapter.grow(pages, "pinned")
        self.adapter.wants = 0
        self.finish(self.step())
        self.adapter.become(kind, *grown)  # type: ignore[arg-type]
        self.balloon.settle()
        return grown

    def can_act(self) -> bool:
        return self.balloon.can_act

    def retry_at(self) -> int | None:
        return self.balloon.retry_at

    def decays_at(self) -> int | None:
        return self.balloon.decays_at

    def status(self) -> tuple[Status, Reason]:
        statistics = self.balloon.statistics()
        return statistics.status, statistics.reason
