"""Credits, and what grows for them."""

from kvquota.agent.contract import PageCommand
from kvquota.native.status import Reason, Status

from tests.agent.balloon_rig import LONG_NS, Rig
from tests.agent.model import ModelRank


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


def test_credits_are_still_to_come_until_every_rank_has_created_them() -> None:
    rig = Rig(ranks=2)
    rig.adapter.is_busy = True
    assert rig.balloon.ask(3) == 3
    rig.ranks[0].create()
    assert rig.balloon.ask(3) == 3
    rig.ranks[1].create(2)
    assert rig.balloon.ask(3) == 1
    assert rig.adapter.allowed == 2
    rig.ranks[1].create()
    assert rig.balloon.ask(3) == 0
    assert rig.adapter.allowed == 3


def test_nothing_is_to_come_beyond_the_target() -> None:
    rig = Rig()
    rig.adapter.is_busy = True
    rig.fill(4)
    rig.limit(6)
    rig.step()
    assert rig.balloon.room == 2
    assert rig.balloon.ask(5) == 2
    rig.create()
    assert rig.balloon.ask(5) == 0
    rig.limit(4)
    assert rig.balloon.room == 0
    assert rig.balloon.ask(5) == 0


def test_nothing_is_to_come_from_ranks_that_refused_or_are_lost() -> None:
    rig = Rig(ranks=2)
    rig.adapter.is_busy = True
    assert rig.balloon.ask(3) == 3
    rig.ranks[0].create()
    rig.ranks[1].create(1)
    rig.ranks[1].refuse()
    assert rig.balloon.ask(3) == 0
    assert rig.adapter.allowed == 1
    # The time to ask again has come.
    rig.now += LONG_NS
    assert rig.balloon.ask(3) == 2
    rig.ranks[0].lost = "gone"
    assert rig.balloon.ask(3) == 0
    assert rig.balloon.room == 0
