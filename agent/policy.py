"""What goes first and how much is asked for: pure functions of pages."""

from typing import NamedTuple

from kvquota.agent.contract import Usage
from kvquota.native.status import Reason, Status


class Shrink(NamedTuple):
    """Pages to take now, and pinned pages to drain."""

    take: int
    drain: int


def target(limit_bytes: int | None, page_bytes: int, capacity: int, floor: int) -> int:
    """Whole pages that a limit allows: never more than there are, never below the floor."""
    allowed = capacity if limit_bytes is None else limit_bytes // page_bytes
    return max(floor, min(capacity, allowed))


def credits_to_hold(held: int, *, reserve: int, wanted: int, empty: int, room: int, busy: bool) -> int:
    """Credits to hold or have asked for.

    The reserve is what should be warm beyond what is wanted; empty pages in circulation are part of it, but
    not of what is wanted beyond them. A busy engine keeps the credits it has when it wants less for now.
    `room`: target - all other pages.
    """
    useful = wanted + max(0, reserve - empty)
    return max(0, min(room, max(held, useful) if busy else useful))


_HALVING_NS = 10_000_000_000


def reserve(budget: int, idle_ns: int) -> int:
    """What of the reserve an engine keeps that has been idle for so long: half of it less every 10 s."""
    return budget >> min(idle_ns // _HALVING_NS, budget.bit_length())


def decays_after(budget: int, warm: int) -> int | None:
    """How long an engine is idle (ns) when `warm` pages become too many; None where they never do."""
    if warm <= 0:
        return None
    halvings = next(n for n in range(budget.bit_length() + 1) if budget >> n < warm)
    # The next request may want at once what the last one had asked for beyond the reserve.
    return max(1, halvings) * _HALVING_NS


def shrink(usage: Usage, excess: int, floor: int) -> Shrink:
    """What goes when `excess` pages are too many: first what can go at once, then exactly the rest drains."""
    excess = max(0, excess)
    take = min(excess, usage.empty + usage.evictable)
    return Shrink(take, min(excess - take, max(0, usage.pinned - floor)))


def surplus(usage: Usage, *, reserve: int, wanted: int, busy: bool) -> int:
    """Empty pages in circulation that an idle engine gives back with no limit asking for it."""
    return 0 if busy else max(0, usage.empty - reserve - wanted)


def standing(
    *, lost: bool, failed: bool, quarantined: int, decided: bool, applied: bool, excess: int, leaving: bool
) -> tuple[Status, Reason]:
    """Where an instance stands. `excess`: pages over the target; `leaving`: a rank has yet to acknowledge."""
    cases = (
        (lost, Status.DEGRADED, Reason.RANK_LOST),
        (failed, Status.DEGRADED, Reason.RANK_FAILED),
        (quarantined > 0, Status.DEGRADED, Reason.QUARANTINED_PAGES),
        (applied, Status.APPLIED, Reason.NONE),
        (not decided, Status.DEFERRED, Reason.SHRINKING),
        (excess > 0, Status.DEFERRED, Reason.PINNED_BY_RUNNING_REQUESTS),
        (leaving, Status.DEFERRED, Reason.WAITING_FOR_RANKS),
        (True, Status.DEFERRED, Reason.FLOOR),
    )
    return next((status, reason) for holds, status, reason in cases if holds)
