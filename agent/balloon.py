"""The books of an instance's pages, and the decisions that follow from them. Owned by the engine thread."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvquota.agent import policy
from kvquota.agent.account import Account
from kvquota.agent.contract import Adapter, PageCommand, Rank, Usage
from kvquota.agent.floor import Floor
from kvquota.native.status import Reason, Status

_FIRST_RETRY_NS = 50_000_000
_LAST_RETRY_NS = 1_000_000_000


@dataclass(frozen=True)
class BalloonStatistics:
    """One instant of the books. Pages, where the name says nothing else; times of CLOCK_MONOTONIC, or 0."""

    status: Status
    reason: Reason
    revision_decided: int
    revision_applied: int
    decided_at_ns: int
    applied_at_ns: int
    limit_bytes: int | None
    page_bytes: int
    capacity_pages: int
    floor_pages: int
    target_pages: int
    mapped_pages: int
    pinned_pages: int
    draining_pages: int
    evictable_pages: int
    warm_pages: int
    retiring_pages: int
    quarantined_pages: int
    credits: int
    pages_mapped: int
    pages_unmapped: int
    passes: int
    ranks: int
    ranks_lost: int


class Balloon:
    """Decides which pages are in circulation, and counts every page until every rank is done with it.

    A page enters circulation for a credit that every rank holds. It leaves through `retiring`, from which
    there is no way back, and counts as released once every rank has acknowledged the command that unmaps it.
    """

    def __init__(
        self,
        adapter: Adapter,
        ranks: Sequence[Rank],
        *,
        pages: int,
        floor: int,
        reserve_bytes: int,
        limit_bytes: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Start with the floor in circulation, mapped on every rank, under `limit_bytes` at revision 0.

        `clock`: CLOCK_MONOTONIC, ns.
        """
        if not ranks or not 0 <= floor < pages:
            raise ValueError(
                f"{len(ranks)} ranks, {pages} pages, floor {floor}: expected ranks, and floor < pages"
            )
        self._adapter = adapter
        self._accounts = [Account(rank, asked=floor) for rank in ranks]
        self._clock = clock
        self._page_bytes = sum(rank.page_bytes for rank in ranks)
        self._capacity = pages
        self._floor = Floor(adapter, floor)
        self._reserve_budget = reserve_bytes // self._page_bytes
        self._idle_since: int | None = None
        self._revision = 0
        self._limit = limit_bytes
        self._target = policy.target(limit_bytes, self._page_bytes, pages, floor)
        self._used = floor  # credits that maps use, the next command's included
        self._seq = 0
        self._maps: list[int] = []  # of the next command
        self._unmaps: list[int] = []
        self._sent: deque[PageCommand] = deque()  # with unmaps that a rank has yet to acknowledge
        self._retiring: set[int] = set()
        self._faulted: set[int] = set()  # on any rank
        self._quarantined: set[int] = set()
        self._creates = True  # no rank failed to create its last credit, but for want of memory
        self._decided = self._applied = 0
        self._decided_at = self._applied_at = 0
        self._mapped_total = floor
        self._unmapped_total = 0
        self._passes = 0
        self._retry_after = _FIRST_RETRY_NS
        self._retry_at = 0

    # What an agent calls

    @property
    def revision(self) -> int:
        """Of the limit in force."""
        return self._revision

    @property
    def limit_bytes(self) -> int | None:
        """The limit in force, as requested."""
        return self._limit

    def set_limit(self, limit_bytes: int | None, revision: int) -> None:
        """Put a limit in force. Raises ValueError for a limit below 0 or a revision not above the last."""
        if revision <= self._revision or (limit_bytes is not None and limit_bytes < 0):
            raise ValueError(
                f"limit {limit_bytes}, revision {revision}: expected 0 or more, above {self._revision}"
            )
        self._revision = revision
        self._limit = limit_bytes
        self._aim()

    def suspend(self) -> None:
        """The engine's KV cache sleeps: every page goes, the floor too, and none grows before resume()."""
        self._floor.asleep = True
        self._aim()

    def resume(self) -> None:
        """It is awake: the floor comes back as soon as there is memory for it, and before anything grows."""
        self._floor.asleep = False
        self._aim()

    def settle(self) -> None:
        """Read what ranks said, adjust credits, judge. Takes no page: right at any time between steps."""
        self._take_in()
        plan = self._plan()
        if plan.drain < self._usage().draining:
            self._adapter.drain(plan.drain)
        self._adjust_credits()
        self._judge()

    def reconcile(self, budget_ns: int) -> None:
        """At the top of a step: settle, and take what should go for about `budget_ns`; more at the next."""
        before = self._clock()
        end = before + budget_ns
        self._passes += 1
        self._take_in()
        if floor := self._floor.take():
            self._retire(floor)
        self._adjust_credits()
        # One page before the first look at the clock: with events on, evicting its blocks may take 1 ms.
        batch = 1
        while (plan := self._plan()).take and self._take(min(plan.take, batch)):
            now = self._clock()
            # As many again must fit too.
            if 2 * now - before > end:
                break
            # Finding what goes looks at every page, for few as for many: more at a time while that fits.
            if 2 * (now - before) <= end - now:
                batch *= 2
            before = now
        plan = self._plan()
        if not plan.take and plan.drain != self._usage().draining:
            self._adapter.drain(plan.drain)
        self._adjust_credits()
        self._judge()

    def end_step(self, grown: Iterable[int]) -> PageCommand | None:
        """After scheduling: note the grown pages, and return the command that the step carries, if any."""
        self._grow(grown)
        self._adjust_credits()
        if not self._maps and not self._unmaps:
            return None
        self._seq += 1
        command = PageCommand(self._seq, tuple(self._maps), tuple(self._unmaps))
        if command.unmaps:
            self._sent.append(command)
        self._mapped_total += len(self._maps)
        self._maps.clear()
        self._unmaps.clear()
        return command

    def ask(self, pages: int) -> int:
        """Ask for `pages` credits. Returns how many of all that were asked for are still to come."""
        self._take_in()
        allowed = self._adjust_credits(pages)
        return 0 if self._lost() else max(0, self._outstanding() - allowed)

    def allow_now(self, pages: int, wait: Callable[[Rank, int], None]) -> int:
        """Ask for `pages` credits and `wait(rank, created)` for them. Returns how many pages may grow now."""
        self._take_in()
        allowed = self._adjust_credits(pages)
        goal = min(pages, self._outstanding())
        if allowed < goal:
            for account in self._accounts:
                wait(account.rank, self._used + goal + account.dropped)
            self._read_reports()
            allowed = self._adjust_credits(pages)
        return min(pages, allowed)

    def idle(self, idle: bool) -> None:
        """Note that the engine has nothing to do from now on, or has again. The reserve decays meanwhile."""
        self._idle_since = self._clock() if idle else None

    def drop_credits(self) -> None:
        """Give every credit back and grow no more: the engine is closing."""
        self._grow(self._adapter.grown())
        self._adapter.allow(0)
        for account in self._accounts:
            account.ask(self._used)

    @property
    def room(self) -> int:
        """Pages that the target allows beyond those in circulation, credits for some of them included."""
        return 0 if self._lost() else max(0, self._target - _circulation(self._usage()) - self._gone())

    @property
    def over(self) -> bool:
        """Whether pages in circulation must go, now or once what pins them ends."""
        return self._excess(self._usage()) > 0

    @property
    def can_act(self) -> bool:
        """Whether a step would get something done now: pages to take or drain, or a command to send."""
        if self._maps or self._unmaps:
            return True
        plan = self._plan()
        return plan.take > 0 or plan.drain > self._usage().draining

    @property
    def retry_at(self) -> int | None:
        """When to ask again for credits that a rank refused (ns); None while nothing waits for that."""
        waits = any(account.refused for account in self._accounts) and self._wanted() > 0
        return self._retry_at if waits and not self._lost() else None

    @property
    def decays_at(self) -> int | None:
        """When an idle engine's reserve next has something to give (ns); None where it has not."""
        if self._idle_since is None or self._lost():
            return None
        warm = self._usage().empty + self._outstanding()
        after = policy.decays_after(self._reserve_budget, warm)
        if after is None or self._idle_since + after <= self._clock():
            # What should have gone already waits for a step, as can_act says.
            return None
        return self._idle_since + after

    def statistics(self) -> BalloonStatistics:
        """The books now."""
        usage = self._usage()
        held = max(account.report.created - account.report.dropped for account in self._accounts) - self._used
        credits_held = max(0, held)
        mapped = _circulation(usage) + self._gone() + credits_held
        # What was applied asleep is so no more once the floor comes back above the limit.
        least = max(mapped, self._floor.kept + self._floor.missing)
        fits = self._limit is None or least * self._page_bytes <= self._limit
        status, reason = policy.standing(
            lost=self._lost() > 0,
            failed=self._rank_failed(),
            quarantined=self._quarantined_pages(),
            decided=self._decided == self._revision,
            applied=self._applied == self._revision and fits,
            excess=self._excess(usage),
            leaving=bool(self._retiring) or any(a.report.dropped < a.dropped for a in self._accounts),
        )
        return BalloonStatistics(
            status=status,
            reason=reason,
            revision_decided=self._decided,
            revision_applied=self._applied,
            decided_at_ns=self._decided_at,
            applied_at_ns=self._applied_at,
            limit_bytes=self._limit,
            page_bytes=self._page_bytes,
            capacity_pages=self._capacity,
            floor_pages=self._floor.pages,
            target_pages=self._target,
            mapped_pages=mapped,
            pinned_pages=usage.pinned,
            draining_pages=usage.draining,
            evictable_pages=usage.evictable,
            warm_pages=usage.empty + credits_held,
            retiring_pages=len(self._retiring),
            quarantined_pages=self._quarantined_pages(),
            credits=credits_held,
            pages_mapped=self._mapped_total,
            pages_unmapped=self._unmapped_total,
            passes=self._passes,
            ranks=len(self._accounts),
            ranks_lost=self._lost(),
        )

    # Books

    def _usage(self) -> Usage:
        return Usage(*self._adapter.usage())

    def _gone(self) -> int:
        """Pages out of circulation that still have memory."""
        return len(self._retiring) + self._quarantined_pages()

    def _quarantined_pages(self) -> int:
        return len(self._quarantined) + max(a.report.quarantined_credits for a in self._accounts)

    def _rank_failed(self) -> bool:
        """Whether a page in circulation has no memory on a rank, or one cannot create what is waited for."""
        if not self._faulted <= self._retiring | self._quarantined:
            return True
        return not self._creates and self._wanted() > 0

    @property
    def _reserve(self) -> int:
        since = self._idle_since
        return policy.reserve(self._reserve_budget, 0 if since is None else self._clock() - since)

    def _lost(self) -> int:
        return sum(account.rank.lost is not None for account in self._accounts)

    def _outstanding(self) -> int:
        """Credits asked of every rank that no page has used."""
        return min(account.net for account in self._accounts) - self._used

    def _excess(self, usage: Usage) -> int:
        # What is left of a sleep that was short makes room for the floor.
        return _circulation(usage) + self._floor.missing + self._quarantined_pages() - self._target

    def _wanted(self) -> int:
        """Pages beyond those in circulation that are wanted, the floor's first; none while asleep."""
        return 0 if self._floor.asleep else self._floor.missing + self._adapter.wanted()

    def _plan(self) -> policy.Shrink:
        usage = self._usage()
        excess, floor = self._excess(usage), self._floor.kept
        if self._limit is not None and self._limit < floor * self._page_bytes:
            # Nothing may be admitted: the floor drains too, though it never goes.
            excess, floor = excess + floor, 0
        if excess > 0:
            return policy.shrink(usage, excess, floor)
        adapter = self._adapter
        surplus = policy.surplus(usage, reserve=self._reserve, wanted=self._wanted(), busy=adapter.busy())
        return policy.Shrink(surplus, 0)

    # What came

    def _take_in(self) -> None:
        """What ranks said, and what the adapter grew meanwhile."""
        self._read_reports()
        self._grow(self._adapter.grown())

    def _read_reports(self) -> None:
        faults_changed = False
        for account in self._accounts:
            before = account.read()
            now = account.report
            if now.refused > before.refused:
                self._retry_at = self._clock() + self._retry_after
                self._retry_after = min(2 * self._retry_after, _LAST_RETRY_NS)
            elif now.created - now.dropped > before.created - before.dropped:
                self._retry_after = _FIRST_RETRY_NS
            faults_changed = faults_changed or now.faults != before.faults
        if faults_changed:
            self._read_faults()
        self._release(min(account.report.done for account in self._accounts))

    def _read_faults(self) -> None:
        faults = [fault for account in self._accounts for fault in account.report.faults]
        self._faulted = {fault.page for fault in faults if fault.page >= 0}
        self._creates = all(fault.operation != "mem_create" for fault in faults)
        gone = self._quarantined - self._faulted
        self._quarantined -= gone
        self._unmapped_total += len(gone)
        self._adapter.give(sorted(gone))

    def _release(self, done: int) -> None:
        while self._sent and self._sent[0].seq <= done:
            pages = self._sent.popleft().unmaps
            self._retiring.difference_update(pages)
            self._quarantined.update(self._faulted.intersection(pages))
            released = [page for page in pages if page not in self._quarantined]
            self._unmapped_total += len(released)
            self._adapter.give(released)

    def _grow(self, pages: Iterable[int]) -> None:
        before = len(self._maps)
        self._maps.extend(pages)
        self._used += len(self._maps) - before

    # Decisions

    def _aim(self) -> None:
        awake = policy.target(self._limit, self._page_bytes, self._capacity, self._floor.pages)
        self._target = 0 if self._floor.asleep else awake

    def _take(self, count: int) -> bool:
        """Take pages out of circulation. False where the adapter had none to give."""
        taken = self._adapter.take(count)
        self._retire(taken)
        return bool(taken)

    def _retire(self, taken: Sequence[int]) -> None:
        # A page that grew and goes before any command maps it: no rank ever hears of it.
        unsent = [page for page in taken if page in self._maps]
        for page in unsent:
            self._maps.remove(page)
        self._used -= len(unsent)
        self._adapter.give(unsent)
        leaving = [page for page in taken if page not in unsent]
        self._unmaps.extend(leaving)
        self._retiring.update(leaving)

    def _adjust_credits(self, wanted: int | None = None) -> int:
        """Ask for or drop credits, and allow those that every rank surely holds. Returns how many."""
        if self._lost():
            self._adapter.allow(0)
            return 0
        usage = self._usage()
        outstanding = self._outstanding()
        wanted = self._wanted() if wanted is None else self._floor.missing + wanted
        hold = policy.credits_to_hold(
            outstanding,
            reserve=self._reserve,
            wanted=wanted,
            empty=usage.empty,
            room=self.room,
            busy=self._adapter.busy(),
        )
        if any(account.refused for account in self._accounts):
            if wanted > 0 and self._clock() >= self._retry_at:
                for account in self._accounts:
                    account.refused = False
            else:
                # What one rank could not create is of no use on the others.
                hold = max(0, min(hold, outstanding))
        for account in self._accounts:
            account.ask(self._used + hold)
        allowed = max(0, min(hold, min(account.kept for account in self._accounts) - self._used))
        if self._floor.missing:
            back = self._floor.put(allowed, self._retiring | self._quarantined)
            self._grow(back)
            allowed = allowed - len(back) if back else 0
        self._adapter.allow(allowed)
        return allowed

    def _judge(self) -> None:
        plan, usage = self._plan(), self._usage()
        over = self._excess(usage) > 0
        if self._decided < self._revision and not (over and plan.take) and plan.drain == usage.draining:
            self._decided = self._revision
            self._decided_at = self._clock()
        most = _circulation(usage) + self._gone()
        most += max(account.most for account in self._accounts) - self._used
        effective = self._capacity * self._page_bytes
        if self._limit is not None:
            effective = min(effective, self._limit)
        fits = most * self._page_bytes <= effective and not self._retiring
        if self._applied < self._decided and fits and not self._lost():
            self._applied = self._decided
            self._applied_at = self._clock()


def _circulation(usage: Usage) -> int:
    return usage.pinned + usage.evictable + usage.empty
