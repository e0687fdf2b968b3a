from kvquota.agent.contract import PageCommand
from kvquota.native.status import Reason, Status

from tests.agent.balloon_rig import Rig


def test_asleep_every_page_goes_and_nothing_grows() -> None:
    rig = Rig(ranks=2, floor=1, reserve=2)
    rig.fill(3)
    rig.create()
    rig.balloon.suspend()
    rig.adapter.wants = 4
    command = rig.step()
    assert command is not None
    assert sorted(command.unmaps) == [0, 1, 2, 3]
    rig.create()
    rig.finish(command)
    rig.balloon.settle()
    statistics = rig.balloon.statistics()
    assert (statistics.mapped_pages, statistics.target_pages) == (0, 0)
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.adapter.allowed == 0
    assert not rig.can_act()
    assert not rig.balloon.over


def test_a_limit_that_comes_while_asleep_is_applied_at_once() -> None:
    rig = Rig(floor=1)
    rig.balloon.suspend()
    rig.finish(rig.step())
    rig.limit(0)
    rig.balloon.settle()
    assert rig.status() == (Status.APPLIED, Reason.NONE)
    assert rig.balloon.statistics().revision_applied == 1
    rig.balloon.resume()
    rig.balloon.settle()
    rig.create()
    rig.finish(rig.step())
    rig.balloon.settle()
    assert rig.status() == (Status.DEFERRED, Reason.FLOOR)
    assert rig.balloon.statistics().mapped_pages == 1
    assert rig.adapter.draining == {0}


def test_on_waking_the_floor_comes_before_anything_else() -> None:
    rig = Rig(ranks=2, floor=1, reserve=3)
    rig.balloon.suspend()
    rig.finish(rig.step())
    rig.create()
    rig.adapter.wants = 2
    rig.balloon.resume()
    assert rig.step() is None
    assert rig.adapter.allowed == 0
    rig.ranks[0].create()
    rig.ranks[1].create(1)
    rig.balloon.settle()
    assert rig.adapter.usage() == (1, 0, 0, 0)
    assert rig.adapter.allowed == 0
    assert rig.can_act()
    assert rig.step() == PageCommand(2, maps=(0,))
    rig.create()
    rig.balloon.settle()
    assert rig.adapter.allowed == 5


def test_the_floor_comes_back_only_once_every_rank_has_let_go_of_it() -> None:
    rig = Rig(ranks=2, floor=1)
    rig.balloon.suspend()
    asleep = rig.step()
    assert asleep is not None
    rig.balloon.resume()
    rig.create()
    rig.ranks[0].finish(asleep)
    assert rig.step() is None
    assert not rig.can_act()
    rig.ranks[1].finish(asleep)
    rig.balloon.settle()
    rig.create()
    assert rig.step() == PageCommand(2, maps=(0,))


def test_a_sleep_that_ends_before_any_command_went_maps_nothing_anew() -> None:
    rig = Rig(floor=1)
    rig.balloon.suspend()
    rig.finish(rig.step())
    rig.balloon.resume()
    rig.balloon.settle()
    rig.create()
    rig.balloon.settle()
    rig.balloon.suspend()
    assert rig.step() is None
    rig.create()
    rig.balloon.settle()
    assert rig.balloon.statistics().mapped_pages == 0
    assert rig.adapter.withheld == set()


def test_pages_that_a_short_sleep_left_make_room_for_the_floor() -> None:
    rig = Rig(floor=1)
    rig.fill(3)
    rig.limit(1)
    rig.balloon.suspend()
    rig.balloon._clock = iter(range(0, 10**9, 1000)).__next__
    rig.balloon.reconcile(1)
    assert set(rig.adapter.pages).isdisjoint({0})
    assert rig.adapter.pages
    rig.balloon.resume()
    for _ in range(3):
        if (command := rig.step()) is not None:
            rig.finish(command)
        rig.create()
    assert set(rig.adapter.pages) == {0}


def test_memory_for_the_floor_is_asked_for_again_after_a_refusal() -> None:
    rig = Rig(floor=1)
    rig.balloon.suspend()
    rig.finish(rig.step())
    assert rig.retry_at() is None
    rig.balloon.resume()
    rig.balloon.settle()
    rig.ranks[0].refuse()
    rig.balloon.settle()
    retry_at = rig.retry_at()
    assert retry_at is not None
    rig.now = retry_at
    rig.balloon.settle()
    rig.create()
    assert rig.step() == PageCommand(2, maps=(0,))
    assert rig.retry_at() is None


def test_a_floor_that_is_in_use_goes_once_it_is_not() -> None:
    rig = Rig(floor=1)
    rig.fill(1, "pinned")
    rig.adapter.floor_is_used = True
    rig.balloon.suspend()
    assert rig.step() is None
    assert rig.balloon.over
    assert not rig.can_act()
    rig.adapter.floor_is_used = False
    rig.adapter.become("evictable", 1)
    command = rig.step()
    assert command is not None
    assert sorted(command.unmaps) == [0, 1]
