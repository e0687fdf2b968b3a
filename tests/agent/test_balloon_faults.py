"""Ranks that are lost, and driver calls that failed."""

from dataclasses import replace

from kvquota.agent.contract import PageCommand, RankFault
from kvquota.native.status import Reason, Status

from tests.agent.balloon_rig import LONG_NS, Rig


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
