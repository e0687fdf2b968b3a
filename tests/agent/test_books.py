"""The balloon over a real queue and real arenas, in every order, and an oracle beside it."""

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvquota.agent.balloon import Balloon
from kvquota.agent.contract import Counters, PageCommand, RankReport
from kvquota.agent.local_rank import LocalRank
from kvquota.native import Arena, DeviceRecord, HostDriver, OutOfMemoryError, PageQueue
from kvquota.native.status import Reason, Status

PAGE = 2 << 20
PAGES = 6
BLOCKS = 4  # of which the last straddles two pages
TIMEOUT = 10.0


class Block:
    __slots__ = ("block_id", "key", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.key: int | None = None


class Pool:
    """An engine's pool as small as it gets: requests hold blocks, and a prefix cache remembers freed ones."""

    engine = "pool 1"

    def __init__(self) -> None:
        self.floor = 0
        self.blocks = [Block(n) for n in range(PAGES * BLOCKS)]
        self.ranges = [(p * BLOCKS, (p + 1) * BLOCKS - 1) for p in range(PAGES)]
        self.queue = PageQueue(self.blocks, self.ranges)
        self.cache: dict[int, Block] = {}
        self.used: dict[int, Block] = {}
        self.circulating: set[int] = set()
        self.withheld: set[int] = set()
        self.mapped: list[set[int]] = []
        self.wants = 0
        self.next_key = 0
        self.usage = self.queue.usage
        self.allow = self.queue.allow

    def begin(self, floor: int) -> None:
        """With a null block, block 0, where there is a floor."""
        self.floor = floor
        if floor:
            self.put_floor()

    def grown(self) -> Sequence[int]:
        pages = self.queue.grown()
        assert self.circulating.isdisjoint(pages)
        assert self.withheld.isdisjoint(pages), "a page came back before every rank was done with it"
        self.circulating.update(pages)
        return pages

    def take(self, pages: int) -> list[int]:
        taken = self.queue.victims(pages)
        for page in taken:
            self.take_page(page)
        return taken

    def take_page(self, page: int) -> None:
        for block in self.queue.take(page):
            self.forget(block)
        first, end = self.ranges[page]
        assert all(n not in self.used for n in range(first, end))
        assert all(self.blocks[n].key is None for n in range(first, end))
        self.circulating.remove(page)
        self.withheld.add(page)

    def take_floor(self) -> list[int]:
        if self.queue.used_blocks(0) > 1:
            return []
        self.queue.prepend_n(self.blocks[:1])
        self.take_page(0)
        return [0]

    def put_floor(self) -> None:
        self.queue.put(0)
        self.queue.remove(self.blocks[0])
        assert 0 not in self.circulating
        self.circulating.add(0)

    def give(self, pages: Sequence[int]) -> None:
        assert self.withheld.issuperset(pages)
        for mapped in self.mapped:
            assert mapped.isdisjoint(pages), "given before every rank was done with it"
        self.withheld.difference_update(pages)
        for page in pages:
            self.queue.give(page)

    def drain(self, pages: int) -> None:
        for page in self.queue.drain(pages, keep=range(self.floor)):
            first, end = self.ranges[page]
            for block in self.blocks[first:end]:
                self.forget(block)

    def forget(self, block: Block) -> None:
        if block.key is not None:
            del self.cache[block.key]
            block.key = None

    def wanted(self) -> int:
        return self.wants

    def busy(self) -> bool:
        return bool(self.used)

    def counters(self) -> Counters:
        return Counters()

    def wake(self) -> None:
        pass

    def allocate(self, count: int) -> None:
        for block in self.queue.popleft_n(count):
            assert block.block_id not in self.used, "a block handed out twice"
            assert block.block_id % BLOCKS != BLOCKS - 1, "a straddling block handed out"
            assert block.ref_cnt == 0
            self.forget(block)
            self.used[block.block_id] = block

    def free(self, blocks: Sequence[Block], cached: bool) -> None:
        for block in blocks:
            del self.used[block.block_id]
            if cached and block.key is None:
                # A draining page's blocks are not to be hit again.
                if not self.queue.is_draining(block):
                    block.key = self.next_key
                    self.cache[block.key] = block
                    self.next_key += 1
            elif not cached:
                self.forget(block)
        if cached:
            self.queue.append_n(blocks)
        else:
            self.queue.prepend_n(blocks)


class SteadyRank(LocalRank):
    """A rank that is at rest after every call, so that an example runs the same way twice."""

    def __init__(self, arena: Arena, driver: HostDriver, name: str) -> None:
        super().__init__(arena, driver, name)
        self.arena = arena
        self.asked = self.dropped = self.seq = 0
        self.mapped: set[int] = set()

    def ask(self, asked: int, dropped: int) -> None:
        self.asked, self.dropped = asked, dropped
        super().ask(asked, dropped)
        self.rest()

    def apply(self, command: PageCommand) -> None:
        assert self.mapped.issuperset(command.unmaps), "unmapping what is not mapped"
        assert self.mapped.isdisjoint(command.maps), "mapping what is mapped"
        held = self.held()
        assert len(command.maps) <= held, f"{command} with {held} credits"
        self.mapped.difference_update(command.unmaps)
        self.mapped.update(command.maps)
        self.seq = command.seq
        super().apply(command)
        self.rest()

    def held(self) -> int:
        report = self.arena.report()
        return report.created - report.mapped - report.dropped

    def rest(self) -> None:
        end = time.monotonic() + TIMEOUT
        while True:
            report = self.arena.report()
            answered = report.created + report.refused == self.asked and report.dropped == self.dropped
            if answered and report.done == self.seq:
                return
            assert time.monotonic() < end, (report.created, report.refused, report.dropped, report.done)
            poller = select.poll()
            poller.register(self.arena.fileno(), select.POLLIN)
            poller.poll(100)
            self.ready()

    def memory_pages(self) -> int:
        assert self._driver is not None
        return os.fstat(self._driver.fileno()).st_blocks * 512 // PAGE


class LaggingRank(SteadyRank):
    """A rank that hears, works and is heard only when the test says so."""

    def __init__(self, arena: Arena, driver: HostDriver, name: str) -> None:
        super().__init__(arena, driver, name)
        self.waiting: list[PageCommand] = []
        self.wish = (0, 0)
        self.heard = RankReport()

    def ask(self, asked: int, dropped: int) -> None:
        self.wish = (asked, dropped)

    def listen(self) -> None:
        super().ask(*self.wish)

    def work(self, count: int) -> None:
        # A command counts on the credits that the rank had reported, not on any ask of later.
        for command in self.waiting[:count]:
            self.apply(command)
        del self.waiting[:count]

    def report(self) -> RankReport:
        return self.heard

    def tell(self) -> None:
        self.heard = super().report()


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.record = DeviceRecord.create(2 * PAGES * PAGE)
        self.other = HostDriver()
        self.other.attach(self.record.fileno())
        self.other_memory: list[int] = []
        self.drivers = [HostDriver(fill=0xFF), HostDriver(fill=0xFF)]
        for driver in self.drivers:
            driver.attach(self.record.fileno())
        self.near = SteadyRank(Arena(self.drivers[0], [PAGE], PAGES), self.drivers[0], "rank 0")
        self.far = LaggingRank(Arena(self.drivers[1], [PAGE], PAGES), self.drivers[1], "rank 1")
        self.pool = Pool()
        self.pool.mapped = [self.near.mapped, self.far.mapped]
        self.revision = 0
        self.limit: int | None = None
        self.applied = 0
        self.asleep = self.started = False
        self.now = 0

    @initialize(reserve=st.integers(0, 3), floor=st.integers(0, 1))
    def start(self, reserve: int, floor: int) -> None:
        self.started = True
        if floor:
            self.near.ask(1, 0)
            self.far.ask(1, 0)
            self.far.listen()
            for rank in (self.near, self.far):
                rank.apply(PageCommand(0, maps=(0,)))
            self.far.tell()
        self.pool.begin(floor)
        self.balloon = Balloon(
            self.pool,
            [self.near, self.far],
            pages=PAGES,
            floor=floor,
            reserve_bytes=reserve * 2 * PAGE,
            # A real clock would have an example run another way the next time.
            clock=lambda: self.now,
        )

    def step(self, work: Callable[[], None] = lambda: None, budget_ns: int = 10**9) -> None:
        self.balloon.reconcile(budget_ns)
        work()
        command = self.balloon.end_step(self.pool.grown())
        if command is not None:
            self.near.apply(command)
            self.far.waiting.append(command)

    # What happens

    @rule(count=st.integers(1, 2 * BLOCKS), running=st.booleans())
    def allocate(self, count: int, running: bool) -> None:
        def work() -> None:
            queue = self.pool.queue
            queue.for_running = running
            free = queue.num_free_blocks
            if count <= free:
                self.pool.allocate(count)
                self.pool.wants = 0
            else:
                self.pool.wants = -(-(count - free) // (BLOCKS - 1))
            queue.for_running = False

        self.step(work)

    @precondition(lambda self: self.pool.used)
    @rule(data=st.data(), cached=st.booleans())
    def free(self, data: st.DataObject, cached: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.pool.used)), min_size=1, unique=True))
        self.pool.free([self.pool.used[n] for n in ids], cached)

    @precondition(lambda self: self.pool.used)
    @rule()
    def free_all(self) -> None:
        self.pool.free(list(self.pool.used.values()), cached=True)

    @precondition(lambda self: any(b.block_id not in self.pool.used for b in self.pool.cache.values()))
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        keys = sorted(k for k, b in self.pool.cache.items() if b.block_id not in self.pool.used)
        key = data.draw(st.sampled_from(keys))

        def work() -> None:
            # The top of the step may have evicted it: then it is not found.
            block = self.pool.cache.get(key)
            if block is not None:
                self.pool.queue.remove(block)
                self.pool.used[block.block_id] = block

        self.step(work)

    @rule()
    def reset_cache(self) -> None:
        for block in list(self.pool.cache.values()):
            self.pool.forget(block)

    @rule(pages=st.one_of(st.none(), st.integers(0, PAGES + 2)), rest=st.integers(0, 2 * PAGE - 1))
    def set_limit(self, pages: int | None, rest: int) -> None:
        self.revision += 1
        self.limit = None if pages is None else pages * 2 * PAGE + rest
        self.balloon.set_limit(self.limit, self.revision)

    @precondition(lambda self: not self.asleep)
    @rule(budget_ns=st.sampled_from([0, 10**9]))
    def suspend(self, budget_ns: int) -> None:
        self.asleep = True
        self.balloon.suspend()
        self.step(budget_ns=budget_ns)

    @precondition(lambda self: self.asleep)
    @rule()
    def resume(self) -> None:
        self.asleep = False
        self.balloon.resume()
        self.step()

    @rule(budget_ns=st.sampled_from([0, 10**9]))
    def pass_by(self, budget_ns: int) -> None:
        self.step(budget_ns=budget_ns)

    @rule()
    def poll(self) -> None:
        self.balloon.settle()

    @rule(ms=st.sampled_from([1, 100, 2000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms * 1_000_000

    @rule(pages=st.integers(1, 3))
    def grow_now(self, pages: int) -> None:
        def work() -> None:
            allowed = self.balloon.allow_now(pages, lambda rank, created: rank.wait(created, 0.05))
            assert 0 <= allowed <= pages

        self.step(work)

    @precondition(lambda self: self.far.waiting)
    @rule(count=st.integers(1, 3))
    def far_rank_works(self, count: int) -> None:
        self.far.work(count)

    @rule()
    def far_rank_listens(self) -> None:
        self.far.listen()

    @precondition(lambda self: self.far.lost is None)
    @rule()
    def far_rank_tells(self) -> None:
        self.far.tell()

    @precondition(lambda self: self.far.lost is None)
    @rule(fate=st.integers(0, 19))
    def far_rank_dies(self, fate: int) -> None:
        if fate == 0:
            self.far.lost = "rank 1 is gone"

    @rule(pages=st.integers(1, 2 * PAGES))
    def another_process_takes_memory(self, pages: int) -> None:
        with suppress(OutOfMemoryError):
            for _ in range(pages):
                self.other_memory.append(self.other.mem_create(PAGE))

    @precondition(lambda self: self.other_memory)
    @rule()
    def another_process_gives_memory_back(self) -> None:
        for handle in self.other_memory:
            self.other.mem_release(handle)
        self.other_memory.clear()

    @precondition(lambda self: self.far.lost is None)
    @rule()
    def all_comes_to_rest(self) -> None:
        self.come_to_rest()

    def come_to_rest(self) -> None:
        """Everyone catches up: then what the books say is what the kernel says, and nothing is left to do."""
        state: object = None
        for _ in range(30):
            self.far.work(len(self.far.waiting))
            self.far.listen()
            self.far.tell()
            self.step()
            before, state = (
                state,
                (
                    replace(self.balloon.statistics(), passes=0),
                    self.far.wish,
                    self.near.asked,
                    self.near.dropped,
                ),
            )
            if state == before and not self.far.waiting:
                break
        else:
            raise AssertionError(f"no rest: {self.balloon.statistics()}")
        statistics = self.balloon.statistics()
        assert statistics.retiring_pages == 0
        assert statistics.mapped_pages == max(self.near.memory_pages(), self.far.memory_pages())
        assert not self.balloon.can_act
        missing = self.pool.floor if not self.asleep and 0 not in self.pool.circulating else 0
        assert not missing or self.balloon.over or self.balloon.retry_at is not None
        below = not self.asleep and self.limit is not None and self.limit < self.pool.floor * 2 * PAGE
        if self.balloon.over:
            # A limit that was applied before the engine fell asleep stays so.
            assert self.asleep or statistics.status == Status.DEFERRED
            assert statistics.evictable_pages == 0
            kept = 0 if below else statistics.target_pages - missing
            assert statistics.draining_pages == statistics.mapped_pages - kept
        elif below:
            assert (statistics.status, statistics.reason) == (Status.DEFERRED, Reason.FLOOR)
            assert statistics.mapped_pages <= self.pool.floor
        else:
            assert statistics.status == Status.APPLIED
            assert statistics.revision_applied == self.revision

    # What always holds

    @invariant()
    def the_queue_adds_up(self) -> None:
        self.pool.queue.check()
        pool = self.pool
        assert sum(pool.usage()[:3]) == len(pool.circulating)
        for n in pool.used:
            assert pool.queue.in_circulation(n // BLOCKS)
        for page in pool.withheld:
            assert not pool.queue.in_circulation(page)

    @invariant()
    def blocks_in_use_have_memory(self) -> None:
        assert {n // BLOCKS for n in self.pool.used} <= self.near.mapped

    @invariant()
    def no_rank_was_promised_what_it_does_not_hold(self) -> None:
        for rank in (self.near, self.far):
            assert self.balloon._used <= rank.held() + rank.arena.report().mapped

    @invariant()
    def applied_is_true(self) -> None:
        statistics = self.balloon.statistics()
        assert statistics.revision_applied <= statistics.revision_decided <= self.revision
        if statistics.revision_applied > self.applied:
            self.applied = statistics.revision_applied
            assert not self.pool.withheld
        # Awake, the floor is there again, whatever was applied while the engine slept.
        said = statistics.status == Status.APPLIED or not self.pool.floor
        if statistics.revision_applied == self.revision and said and self.limit is not None:
            for rank in (self.near, self.far):
                assert rank.memory_pages() * 2 * PAGE <= self.limit
        if self.far.lost is not None:
            assert statistics.status == Status.DEGRADED

    def teardown(self) -> None:
        try:
            # An example can end before it began.
            if self.started and self.far.lost is None:
                self.come_to_rest()
        finally:
            for handle in self.other_memory:
                self.other.mem_release(handle)
            for rank in (self.near, self.far):
                rank.arena.close()
            self.record.close()
        for driver in self.drivers:
            assert os.fstat(driver.fileno()).st_blocks == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_books_at_length() -> None:
    run_state_machine_as_test(Books, settings=settings(max_examples=2000, deadline=None))
