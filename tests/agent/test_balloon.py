from dataclasses import replace

import pytest
from kvquota.agent.balloon import Balloon
from kvquota.agent.contract import PageCommand, RankFault
from kvquota.native.status import Reason, Status

from tests.agent.model import MIB, ModelAdapter, ModelRank

PAGES = 16
LONG_NS = 10**9


class Rig:
    """A balloon between a model engine and model ranks, with a clock that only the test moves."""

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

    def status(self) -> tuple[Status, Reason]:
        statistics = self.balloon.statistics()
        return statistics.status, statistics.reason


def test_never_limited_is_applied() -> None:
    rig = Rig()
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.balloon.statistics().target_pages == PAGES


def test_growth_needs_a_credit_on_every_rank() -> None:
    rig = Rig(ranks=2)
    rig.adapter.wants = 3
    rig.balloon.settle()
    assert [rank.asked for rank in rig.ranks] == [3, 3]
    rig.ranks[0].create(3)
    rig.balloon.settle()
    assert rig.adapter.allowed == 0
    rig.ranks[1].create(2)
    rig.balloon.settle()
    assert rig.adapter.allowed == 2


def test_a_grown_page_uses_its_credit_before_any_rank_says_so() -> None:
    rig = Rig()
    rig.adapter.wants = 2
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    rig.adapter.grow(2)
    rig.adapter.wants = 0
    command = rig.step()
    assert command == PageCommand(1, maps=(0, 1))
    assert rig.adapter.allowed == 0
    assert rig.balloon.statistics().credits == 0
    assert rig.balloon.statistics().mapped_pages == 2


def test_the_reserve_is_kept_ahead_and_counts_empty_pages() -> None:
    rig = Rig(reserve=4)
    rig.balloon.settle()
    assert rig.ranks[0].asked == 4
    rig.create()
    rig.balloon.settle()
    page = rig.adapter.grow(1)
    rig.step()
    assert rig.ranks[0].asked == 5
    rig.adapter.become("empty", *page)
    rig.balloon.settle()
    assert rig.ranks[0].asked - rig.ranks[0].drop_wanted == 4


def test_credits_never_go_beyond_the_target() -> None:
    rig = Rig(reserve=4)
    rig.limit(6)
    rig.fill(5)
    rig.balloon.settle()
    assert rig.ranks[0].asked - rig.ranks[0].drop_wanted == 6


def test_a_shrink_drops_credits_first_then_empty_then_evictable_pages() -> None:
    rig = Rig(reserve=3)
    evictable = rig.fill(4)
    rig.create()
    rig.balloon.settle()
    assert rig.balloon.statistics().credits == 3
    rig.limit(5)
    rig.step()
    assert set(rig.adapter.pages) == set(evictable)
    rig.create()
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.balloon.statistics().mapped_pages == 5
    rig.limit(2)
    command = rig.step()
    assert command is not None
    assert len(command.unmaps) == 2


def test_applied_waits_for_every_rank() -> None:
    rig = Rig(ranks=2)
    rig.fill(4)
    rig.limit(1)
    command = rig.step()
    rig.create()
    rig.balloon.settle()
    statistics = rig.balloon.statistics()
    assert (statistics.revision_decided, statistics.revision_applied) == (1, 0)
    assert rig.status() == (Status.DEFERRED, Reason.WAITING_FOR_RANKS)
    assert command is not None
    rig.ranks[0].finish(command)
    rig.balloon.settle()
    assert rig.balloon.statistics().revision_applied == 0
    assert rig.balloon.statistics().retiring_pages == 3
    assert len(rig.adapter.withheld) == 3
    rig.ranks[1].finish(command)
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.balloon.statistics().pages_unmapped == 3
    assert rig.adapter.withheld == set()


def test_a_drop_counts_once_it_is_acknowledged() -> None:
    rig = Rig(reserve=4)
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    rig.limit(1)
    rig.step()
    assert rig.adapter.allowed <= 1
    assert rig.status() == (Status.DEFERRED, Reason.WAITING_FOR_RANKS)
    rig.ranks[0].serve_drops()
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_a_drop_that_crosses_a_refusal_leaves_the_books_exact() -> None:
    rig = Rig()
    rig.adapter.wants = 5
    rig.balloon.settle()
    rank = rig.ranks[0]
    rank.create(2)
    rig.balloon.settle()
    rig.adapter.grow(2)
    rig.adapter.wants = 0
    rig.limit(2)
    rig.step()
    assert rank.drop_wanted == 3
    rank.refuse()
    rig.balloon.settle()
    rank.serve_drops()
    rig.balloon.settle()
    assert rank.state.created - rank.state.dropped == 2
    assert rig.balloon.statistics().credits == 0
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_a_drop_after_a_refusal_takes_what_is_held_too() -> None:
    rig = Rig()
    rig.adapter.wants = 5
    rig.balloon.settle()
    rank = rig.ranks[0]
    rank.create(2)
    rank.refuse()
    rig.balloon.settle()
    rig.adapter.wants = 0
    rig.limit(0)
    rig.step()
    rank.serve_drops()
    rig.balloon.settle()
    assert rank.state.created == rank.state.dropped
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_applied_waits_for_what_retires_even_where_the_limit_has_room_for_it() -> None:
    rig = Rig()
    rig.fill(4)
    rig.limit(1)
    command = rig.step()
    rig.limit(None)
    rig.balloon.settle()
    assert rig.status() == (Status.DEFERRED, Reason.WAITING_FOR_RANKS)
    rig.finish(command)
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_a_refusal_is_asked_again_after_a_while_only_while_something_waits() -> None:
    rig = Rig()
    rig.adapter.wants = 3
    rig.balloon.settle()
    rank = rig.ranks[0]
    rank.create(1)
    rank.refuse()
    rig.balloon.settle()
    assert rig.adapter.allowed == 1
    assert rank.asked == 3
    assert rig.retry_at() == rig.now + 50_000_000
    rig.adapter.wants = 0
    assert rig.retry_at() is None
    rig.adapter.wants = 3
    rig.now += 50_000_000
    rig.balloon.settle()
    assert rank.asked == 5
    rank.refuse()
    rig.balloon.settle()
    assert rig.retry_at() == rig.now + 100_000_000
    rig.now += 100_000_000
    rig.balloon.settle()
    rank.create()
    rig.balloon.settle()
    assert rig.adapter.allowed == 3
    assert rig.retry_at() is None


def test_what_one_rank_refused_is_given_back_by_the_others() -> None:
    rig = Rig(ranks=2)
    rig.adapter.wants = 4
    rig.balloon.settle()
    rig.ranks[0].create(1)
    rig.ranks[0].refuse()
    rig.ranks[1].create(4)
    rig.balloon.settle()
    assert rig.ranks[1].drop_wanted == 3
    assert rig.adapter.allowed == 1


def test_exactly_the_pinned_rest_drains_and_a_higher_target_undoes_it() -> None:
    rig = Rig()
    pinned = rig.fill(3, "pinned")
    rig.fill(2)
    rig.limit(1)
    rig.step()
    assert len(rig.adapter.draining) == 2
    assert rig.status() == (Status.DEFERRED, Reason.PINNED_BY_RUNNING_REQUESTS)
    assert rig.balloon.statistics().revision_decided == 1
    assert rig.balloon.over
    assert not rig.can_act()
    rig.limit(2)
    rig.balloon.settle()
    assert len(rig.adapter.draining) == 1
    rig.limit(None)
    rig.balloon.settle()
    assert rig.adapter.draining == set()
    assert set(pinned) == set(rig.adapter.pages)


def test_a_draining_page_goes_once_its_last_block_is_free() -> None:
    rig = Rig()
    rig.fill(3, "pinned")
    rig.limit(1)
    rig.step()
    page = min(rig.adapter.draining)
    assert not rig.can_act()
    rig.adapter.become("empty", page)
    assert rig.can_act()
    command = rig.step()
    assert command is not None
    assert command.unmaps == (page,)
    assert len(rig.adapter.draining) == 1


def test_a_raised_limit_allows_growth_again_at_once_with_the_credits_at_hand() -> None:
    rig = Rig(reserve=2)
    rig.balloon.settle()
    rig.create()
    rig.limit(0)
    rig.balloon.settle()
    assert rig.adapter.allowed == 0
    rig.create()
    rig.limit(8)
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    assert rig.adapter.allowed == 2


def test_limit_zero_with_a_floor_settles_as_floor_and_reports_the_request() -> None:
    rig = Rig(floor=1)
    rig.fill(3)
    rig.limit(0)
    rig.finish(rig.step())
    rig.balloon.settle()
    statistics = rig.balloon.statistics()
    assert rig.status() == (Status.DEFERRED, Reason.FLOOR)
    assert statistics.limit_bytes == 0
    assert statistics.target_pages == statistics.mapped_pages == 1
    assert statistics.revision_applied == 0


def test_below_the_floor_the_floor_drains_so_that_nothing_is_admitted() -> None:
    rig = Rig(floor=1)
    rig.limit(1)
    rig.step()
    assert rig.adapter.draining == set()
    rig.limit(0)
    rig.step()
    assert rig.adapter.draining == {0}
    rig.limit(8)
    rig.step()
    assert rig.adapter.draining == set()


def test_a_limit_above_the_range_is_clamped_and_kept_as_asked() -> None:
    rig = Rig()
    rig.limit(1000)
    rig.balloon.settle()
    statistics = rig.balloon.statistics()
    assert statistics.target_pages == PAGES
    assert statistics.limit_bytes == 1000 * rig.page_bytes
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_a_pass_stops_at_its_budget_and_goes_on() -> None:
    rig = Rig()
    rig.fill(12)
    rig.limit(0)
    rig.balloon._clock = iter(range(0, 10**9, 1000)).__next__
    rig.balloon.reconcile(1)
    assert 0 < len(rig.adapter.pages) < 12
    assert rig.can_act()
    assert rig.status() == (Status.DEFERRED, Reason.SHRINKING)
    for _ in range(12):
        rig.balloon.reconcile(1)
    assert rig.adapter.pages == {}
    assert rig.balloon.statistics().revision_decided == 1


def test_a_pass_takes_more_at_a_time_while_its_budget_allows() -> None:
    rig = Rig()
    rig.fill(12)
    rig.limit(0)
    asked: list[int] = []
    take = rig.adapter.take
    rig.adapter.take = lambda pages: asked.append(pages) or take(pages)  # type: ignore[func-returns-value,method-assign]
    rig.balloon.reconcile(LONG_NS)
    assert rig.adapter.pages == {}
    assert asked == [4, 8]


def test_a_lost_rank_degrades_and_its_pages_are_never_released() -> None:
    rig = Rig(ranks=2)
    rig.fill(4)
    rig.limit(0)
    command = rig.step()
    assert command is not None
    rig.ranks[0].finish(command)
    rig.ranks[1].lost = "rank 1 is gone"
    for _ in range(3):
        rig.step()
    assert rig.status() == (Status.DEGRADED, Reason.RANK_LOST)
    statistics = rig.balloon.statistics()
    assert statistics.retiring_pages == 4
    assert statistics.revision_applied == 0
    assert statistics.ranks_lost == 1
    assert len(rig.adapter.withheld) == 4
    assert rig.adapter.allowed == 0


def test_a_fault_quarantines_its_page_and_the_pool_goes_on() -> None:
    rig = Rig()
    rig.fill(4)
    rig.limit(2)
    command = rig.step()
    assert command is not None
    bad, good = command.unmaps
    rig.ranks[0].finish(command, RankFault(command.seq, bad, "mem_unmap", 5, "EIO"))
    rig.balloon.settle()
    assert rig.status() == (Status.DEGRADED, Reason.QUARANTINED_PAGES)
    assert rig.adapter.withheld == {bad}
    # Its memory is still there, so one page more has to go.
    command = rig.step()
    assert command is not None
    assert len(command.unmaps) == 1
    rig.finish(command)
    rig.balloon.settle()
    statistics = rig.balloon.statistics()
    assert (statistics.mapped_pages, statistics.quarantined_pages) == (2, 1)
    assert statistics.revision_applied == 1
    assert good not in rig.adapter.withheld


def test_a_quarantined_page_that_goes_later_may_grow_again() -> None:
    rig = Rig(ranks=2)
    rig.fill(4)
    rig.limit(3)
    command = rig.step()
    assert command is not None
    (page,) = command.unmaps
    rig.ranks[0].finish(command, RankFault(command.seq, page, "mem_unmap", 5, "EIO"))
    rig.ranks[1].finish(command, RankFault(command.seq, page, "mem_release", 5, "EIO"))
    rig.balloon.settle()
    rig.ranks[0].mend()
    rig.balloon.settle()
    assert rig.status() == (Status.DEGRADED, Reason.QUARANTINED_PAGES)
    assert rig.adapter.withheld == {page}
    rig.ranks[1].mend()
    rig.balloon.settle()
    assert rig.adapter.withheld == set()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    statistics = rig.balloon.statistics()
    assert (statistics.mapped_pages, statistics.quarantined_pages, statistics.pages_unmapped) == (3, 0, 1)


def test_a_fault_that_is_mended_before_every_rank_is_done_quarantines_nothing() -> None:
    rig = Rig(ranks=2)
    rig.fill(2)
    rig.limit(1)
    command = rig.step()
    assert command is not None
    rig.ranks[0].finish(command, RankFault(command.seq, command.unmaps[0], "mem_unmap", 5, "EIO"))
    rig.balloon.settle()
    assert rig.status() == (Status.DEFERRED, Reason.WAITING_FOR_RANKS)
    rig.ranks[0].mend()
    rig.ranks[1].finish(command)
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_a_map_that_failed_is_a_failed_rank_until_the_page_goes() -> None:
    rig = Rig()
    page, *_ = rig.fill(2)
    rig.ranks[0].finish(PageCommand(1), RankFault(1, page, "mem_map", 1, "INVALID"))
    rig.balloon.settle()
    assert rig.status() == (Status.DEGRADED, Reason.RANK_FAILED)
    rig.limit(0)
    command = rig.step()
    rig.ranks[0].mend()
    rig.finish(command)
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.adapter.withheld == set()


def test_a_rank_that_cannot_create_is_failed_while_something_waits_for_it() -> None:
    rig = Rig()
    rig.limit(8)
    rig.adapter.wants = 1
    rig.balloon.settle()
    rank = rig.ranks[0]
    rank.refuse()
    rank.state = replace(rank.state, faults=(RankFault(0, -1, "mem_create", 110, "ETIMEDOUT"),))
    rig.balloon.settle()
    assert rig.status() == (Status.DEGRADED, Reason.RANK_FAILED)
    rig.adapter.wants = 0
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    rig.adapter.wants = 1
    rig.now += LONG_NS
    rig.balloon.settle()
    assert rig.status() == (Status.DEGRADED, Reason.RANK_FAILED)
    rank.create()
    rank.mend()
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.adapter.allowed == 1


def test_memory_of_a_credit_that_does_not_go_counts_as_mapped() -> None:
    rig = Rig(reserve=4)
    rig.balloon.settle()
    rig.create()
    rig.limit(0)
    rank = rig.ranks[0]
    rig.balloon.settle()
    rank.serve_drops()
    fault = RankFault(0, -1, "mem_release", 5, "EIO")
    rank.state = replace(rank.state, quarantined_credits=2, faults=(fault,))
    rig.balloon.settle()
    assert rig.status() == (Status.DEGRADED, Reason.QUARANTINED_PAGES)
    statistics = rig.balloon.statistics()
    assert (statistics.mapped_pages, statistics.quarantined_pages, statistics.revision_applied) == (2, 2, 0)
    rank.state = replace(rank.state, quarantined_credits=0, faults=())
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.balloon.statistics().mapped_pages == 0


def test_a_page_that_grew_and_goes_before_it_was_mapped_is_unknown_to_ranks() -> None:
    rig = Rig()
    rig.fill(1)
    rig.adapter.wants = 1
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    rig.adapter.grow(1, "empty")
    rig.adapter.wants = 0
    rig.limit(1)
    assert rig.step() is None
    rig.create()
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.adapter.withheld == set()
    assert rig.balloon.statistics().mapped_pages == 1


def test_an_idle_engine_gives_empty_pages_beyond_the_reserve_back() -> None:
    rig = Rig(reserve=1)
    rig.adapter.is_busy = True
    rig.fill(4, "empty")
    assert not rig.can_act()
    rig.adapter.is_busy = False
    assert rig.can_act()
    command = rig.step()
    assert command is not None
    assert len(command.unmaps) == 3
    assert rig.status() == (Status.APPLIED, Reason.NONE)


def test_growth_for_a_running_request_waits_for_the_credits_it_asks_for() -> None:
    rig = Rig(ranks=2)
    waited: list[str] = []

    def wait(rank: ModelRank, created: int) -> None:
        waited.append(rank.name)
        rank.wait(created, 1.0)

    assert rig.balloon.allow_now(2, wait) == 2  # type: ignore[arg-type]
    assert waited == ["rank 0", "rank 1"]
    assert rig.adapter.allowed == 2
    rig.limit(0)
    rig.balloon.settle()
    waited.clear()
    assert rig.balloon.allow_now(2, wait) == 0  # type: ignore[arg-type]
    assert waited == []


@pytest.mark.parametrize(("limit", "revision"), [(5, 0), (-1, 2), (5, 1)])
def test_a_limit_that_cannot_be_changes_nothing(limit: int, revision: int) -> None:
    rig = Rig()
    rig.limit(3)
    with pytest.raises(ValueError, match=str(limit)):
        rig.balloon.set_limit(limit, revision)
    assert rig.balloon.limit_bytes == 3 * rig.page_bytes
