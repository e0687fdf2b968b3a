"""What a limit makes of pages: taken, drained, applied."""

import pytest
from kvquota.native.status import Reason, Status

from tests.agent.balloon_rig import LONG_NS, PAGES, Rig


def test_never_limited_is_applied() -> None:
    rig = Rig()
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.balloon.statistics().target_pages == PAGES


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


def test_another_page_drains_for_one_that_emptied_before_it_was_seen_to_go() -> None:
    rig = Rig()
    rig.fill(3, "pinned")
    rig.limit(1)
    rig.step()
    rig.adapter.become("empty", min(rig.adapter.draining))
    rig.limit(0)
    assert rig.can_act()
    rig.step()
    assert rig.adapter.draining == set(rig.adapter.pages)
    assert len(rig.adapter.pages) == 2


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
    assert asked == [1, 2, 4, 5]


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


def test_the_reserve_of_an_idle_engine_decays_and_is_whole_again_once_it_works() -> None:
    rig = Rig(reserve=5)
    rig.balloon.settle()
    rig.create()
    rig.adapter.is_busy = True
    rig.balloon.settle()
    assert rig.decays_at() is None
    rig.adapter.is_busy = False
    rig.balloon.idle(True)
    kept = []
    while (at := rig.decays_at()) is not None:
        rig.now = at - 1
        rig.balloon.settle()
        assert rig.decays_at() == at
        rig.now = at
        rig.balloon.settle()
        rig.create()
        rig.balloon.settle()
        kept.append(rig.balloon.statistics().warm_pages)
    assert kept == [2, 1, 0]
    assert rig.now == 1 + 30_000_000_000
    rig.adapter.is_busy = True
    rig.balloon.idle(False)
    rig.adapter.wants = 1
    rig.balloon.settle()
    rank = rig.ranks[0]
    assert rank.asked - rank.drop_wanted == 6


def test_empty_pages_of_the_reserve_decay_with_a_step() -> None:
    rig = Rig(reserve=4)
    rig.adapter.is_busy = True
    rig.fill(4, "empty")
    rig.adapter.is_busy = False
    rig.balloon.idle(True)
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    assert not rig.can_act()
    at = rig.decays_at()
    assert at is not None
    rig.now = at
    rig.balloon.settle()
    # Nobody is to be woken again for what a step will do.
    assert rig.decays_at() is None
    assert rig.can_act()
    command = rig.step()
    assert command is not None
    assert len(command.unmaps) == 2
    assert rig.decays_at() == at + 10_000_000_000


def test_an_idle_engine_is_woken_only_where_it_has_something_to_give() -> None:
    rig = Rig(reserve=8)
    rig.limit(1)
    rig.step()
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    rig.balloon.idle(True)
    # One page of eight is warm: it goes with the fourth halving.
    assert rig.decays_at() == 1 + 40_000_000_000
    rig.limit(0)
    rig.step()
    rig.create()
    rig.balloon.settle()
    assert rig.decays_at() is None


@pytest.mark.parametrize(("limit", "revision"), [(5, 0), (-1, 2), (5, 1)])
def test_a_limit_that_cannot_be_changes_nothing(limit: int, revision: int) -> None:
    rig = Rig()
    rig.limit(3)
    with pytest.raises(ValueError, match=str(limit)):
        rig.balloon.set_limit(limit, revision)
    assert rig.balloon.limit_bytes == 3 * rig.page_bytes
