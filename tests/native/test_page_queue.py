import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvquota.native import PageQueue

# The public names of vLLM 0.32's FreeKVCacheBlockQueue, but for its two fake ends: nobody else uses those.
VLLM_NAMES = {
    "append",
    "append_n",
    "get_all_free_blocks",
    "iter_blocks_after",
    "num_free_blocks",
    "popleft",
    "popleft_n",
    "prepend_n",
    "remove",
}


@dataclass(eq=False, slots=True)
class Block:
    """Keeps its number in a slot, as vLLM's block does."""

    block_id: int


class LooseBlock:
    """Computes its number, so that it is found by name."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def block_id(self) -> int:
        return self.number


# Straddlers at 4 and 13, a short last page, a page with no block at all.
PAGES = [(0, 4), (5, 9), (9, 13), (14, 18), (18, 18), (18, 22), (22, 24)]
BLOCKS = 25


def make(
    pages: Sequence[tuple[int, int]] = PAGES, *, put: Sequence[int] = ()
) -> tuple[list[Block], PageQueue]:
    blocks = [Block(number) for number in range(BLOCKS)]
    queue = PageQueue(blocks, pages)
    for page in put:
        queue.put(page)
    return blocks, queue


def ids(blocks: Sequence[Block]) -> list[int]:
    return [block.block_id for block in blocks]


class Model:
    """What PageQueue does, said plainly: lists, walked from end to end."""

    def __init__(self) -> None:
        self.uncached: list[int] = []
        self.cached: list[int] = []
        self.reserved: list[int] = []  # the free blocks of draining pages
        self.used: set[int] = set()
        self.known: set[int] = set()  # free blocks that were freed as cached
        self.inside: set[int] = set()
        self.taken: set[int] = set()
        self.draining: set[int] = set()
        self.allowed = 0
        self.grown: list[int] = []
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def blocks(self, page: int) -> range:
        return range(*PAGES[page])

    def page(self, block: int) -> int:
        return next(page for page in range(len(PAGES)) if block in self.blocks(page))

    def used_in(self, page: int) -> int:
        return len(self.used.intersection(self.blocks(page)))

    def growable(self) -> list[int]:
        out = set(range(len(PAGES))) - self.inside - self.taken
        return sorted(page for page in out if self.blocks(page))[: self.allowed]

    def free(self, *, for_running: bool = False) -> int:
        growable = sum(len(self.blocks(page)) for page in self.growable())
        return len(self.uncached) + len(self.cached) + growable + (len(self.reserved) if for_running else 0)

    def order(self, *, for_running: bool = False) -> list[int]:
        return self.uncached + self.cached + (self.reserved if for_running else [])

    def circulate(self, page: int) -> None:
        self.inside.add(page)
        self.uncached += self.blocks(page)

    def pop(self) -> int:
        if not self.uncached and self.growable():
            page = self.growable()[0]
            self.allowed -= 1
            self.grown.append(page)
            self.circulate(page)
        block = (self.uncached or self.cached or self.reserved)[0]
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        for places in (self.uncached, self.cached, self.reserved):
            if block in places:
                places.remove(block)
        self.known.discard(block)
        self.used.add(block)

    def release(self, blocks: list[int], *, cached: bool) -> None:
        self.clock += 1
        place = 0
        for block in blocks:
            page = self.page(block)
            self.used.remove(block)
            self.last_use[page] = self.clock
            if cached:
                self.known.add(block)
            if page in self.draining:
                self.reserved.append(block)
            elif cached:
                self.cached.append(block)
            else:
                self.uncached.insert(place, block)
                place += 1
            if page in self.draining and not self.used_in(page):
                self.undrain(page)

    def undrain(self, page: int) -> None:
        self.draining.remove(page)
        for block in self.blocks(page):
            if block in self.reserved:
                self.reserved.remove(block)
                (self.cached if block in self.known else self.uncached).append(block)

    def victims(self) -> list[int]:
        unused = [page for page in self.inside if not self.used_in(page)]
        empty = [page for page in unused if not self.known.intersection(self.blocks(page))]
        full = [page for page in unused if page not in empty]
        return sorted(empty, reverse=True) + sorted(full, key=lambda page: (self.last_use[page], -page))

    def take(self, page: int) -> list[int]:
        held = [block for block in self.blocks(page) if block in self.known]
        for block in self.blocks(page):
            self.remove(block)
            self.used.remove(block)
        self.inside.remove(page)
        self.taken.add(page)
        return held

    def drain(self, count: int, keep: set[int]) -> list[int]:
        pinned = [page for page in self.inside if self.used_in(page) and page not in keep]
        pinned.sort(key=lambda page: (page not in self.draining, self.used_in(page), -page))
        chosen = pinned[:count]
        for page in sorted(self.draining.difference(chosen)):
            self.undrain(page)
        new = [page for page in chosen if page not in self.draining]
        for page in new:
            for block in self.blocks(page):
                if block in self.uncached or block in self.cached:
                    (self.uncached if block in self.uncached else self.cached).remove(block)
                    self.reserved.append(block)
            self.draining.add(page)
        return new

    def usage(self) -> tuple[int, int, int, int]:
        pinned = sum(1 for page in self.inside if self.used_in(page))
        empty = sum(
            1
            for page in self.inside
            if not self.used_in(page) and not self.known.intersection(self.blocks(page))
        )
        return pinned, len(self.inside) - pinned - empty, empty, len(self.draining)


class QueueMachine(RuleBasedStateMachine):
    """PageQueue and the model do the same things and must say the same."""

    @initialize(slots=st.booleans())
    def start(self, slots: bool) -> None:
        kind = Block if slots else LooseBlock
        self.blocks = [kind(number) for number in range(BLOCKS)]
        self.queue = PageQueue(self.blocks, PAGES)
        self.model = Model()

    def pick(self, data: st.DataObject, of: Sequence[int]) -> int:
        return data.draw(st.sampled_from(sorted(of)))

    @rule(pages=st.integers(0, 8))
    def allow(self, pages: int) -> None:
        self.queue.allow(pages)
        self.model.allowed = pages

    @rule(count=st.integers(0, 12), for_running=st.booleans())
    def pop(self, count: int, for_running: bool) -> None:
        self.queue.for_running = for_running
        if count > self.model.free(for_running=for_running):
            with pytest.raises(ValueError, match=f"cannot hand out {count} blocks"):
                self.queue.popleft_n(count)
        else:
            popped = self.queue.popleft_n(count) if count != 1 else [self.queue.popleft()]
            assert ids(popped) == [self.model.pop() for _ in range(count)]
        self.queue.for_running = False

    @rule(data=st.data(), cached=st.booleans())
    def release(self, data: st.DataObject, cached: bool) -> None:
        chosen = data.draw(st.permutations(sorted(self.model.used)))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        blocks = [self.blocks[number] for number in chosen]
        if cached and len(blocks) == 1:
            self.queue.append(blocks[0])
        elif cached:
            self.queue.append_n(blocks)
        else:
            self.queue.prepend_n(blocks)
        self.model.release(list(chosen), cached=cached)

    @rule(data=st.data(), cached=st.booleans())
    def release_wrongly(self, data: st.DataObject, cached: bool) -> None:
        wrong = self.pick(data, [number for number in range(BLOCKS) if number not in self.model.used])
        good = [self.blocks[number] for number in sorted(self.model.used)]
        for batch in ([*good, self.blocks[wrong]], [*good[:1], *good[:1]]):
            if batch:
                with pytest.raises(ValueError, match=r"block \d+ is (free already|withheld)"):
                    (self.queue.append_n if cached else self.queue.prepend_n)(batch)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, BLOCKS - 1))
        if number in self.model.order(for_running=True):
            self.queue.remove(self.blocks[number])
            self.model.remove(number)
        else:
            state = "used" if number in self.model.used else "withheld"
            with pytest.raises(ValueError, match=f"block {number} is {state}"):
                self.queue.remove(self.blocks[number])

    @rule(page=st.integers(0, len(PAGES) - 1))
    def put(self, page: int) -> None:
        if page in self.model.inside or page in self.model.taken:
            with pytest.raises(ValueError, match=f"page {page} is"):
                self.queue.put(page)
        else:
            self.queue.put(page)
            self.model.circulate(page)

    @rule(count=st.integers(0, 8))
    def take_victims(self, count: int) -> None:
        victims = self.queue.victims(count)
        assert victims == self.model.victims()[:count]
        for page in victims:
            assert ids(self.queue.take(page)) == self.model.take(page)

    @rule(data=st.data())
    def take_wrongly(self, data: st.DataObject) -> None:
        page = self.pick(data, range(len(PAGES)))
        if page not in self.model.victims():
            with pytest.raises(ValueError, match=f"page {page} .*(block \\d+ is used|not in circulation)"):
                self.queue.take(page)

    @rule(page=st.integers(0, len(PAGES) - 1))
    def give(self, page: int) -> None:
        if page in self.model.taken:
            self.queue.give(page)
            self.model.taken.remove(page)
        else:
            with pytest.raises(ValueError, match=f"page {page} is not taken"):
                self.queue.give(page)

    @rule(count=st.integers(0, 8), keep=st.sets(st.integers(0, len(PAGES) - 1), max_size=2))
    def drain(self, count: int, keep: set[int]) -> None:
        assert self.queue.drain(count, keep=sorted(keep)) == self.model.drain(count, keep)

    @rule()
    def grown(self) -> None:
        assert self.queue.grown() == self.model.grown
        self.model.grown = []

    @precondition(lambda self: hasattr(self, "queue"))
    @invariant()
    def same(self) -> None:
        queue, model = self.queue, self.model
        queue.check()
        assert queue.num_free_blocks == model.free()
        assert queue.num_uncached_blocks == model.free() - len(model.cached)
        assert ids(queue.get_all_free_blocks()) == model.order()
        queue.for_running = True
        assert queue.num_free_blocks == model.free(for_running=True)
        assert ids(queue.get_all_free_blocks()) == model.order(for_running=True)
        assert ids(list(queue.iter_blocks_after(None))) == model.order(for_running=True)
        queue.for_running = False
        assert queue.usage() == model.usage()
        assert queue.num_used_blocks == len(model.used)
        assert queue.max_free_blocks == sum(end - first for first, end in PAGES) - len(model.used)
        for page in range(len(PAGES)):
            assert queue.in_circulation(page) == (page in model.inside)
            assert queue.used_blocks(page) == model.used_in(page)
            for block in model.blocks(page):
                assert queue.is_draining(self.blocks[block]) == (page in model.draining)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


def test_it_has_every_public_name_of_vllms_queue() -> None:
    assert set(dir(PageQueue)) >= VLLM_NAMES


@pytest.mark.vllm
def test_the_names_are_those_of_the_installed_vllm() -> None:
    import_module("tests.support.vllm_imports")
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    theirs = {name for name in dir(FreeKVCacheBlockQueue([])) if not name.startswith(("_", "fake_"))}
    assert theirs == VLLM_NAMES


def test_blocks_come_uncached_first_then_grown_then_least_recently_used_then_draining() -> None:
    blocks, queue = make([(0, 3), (3, 6), (6, 9)], put=[0, 1])
    assert ids(queue.popleft_n(6)) == [0, 1, 2, 3, 4, 5]
    queue.append_n([blocks[1], blocks[0]])
    queue.prepend_n([blocks[5], blocks[4]])
    assert queue.drain(1) == [1]
    queue.allow(1)
    assert queue.num_free_blocks == 5
    queue.for_running = True
    assert queue.num_free_blocks == 7
    assert ids(queue.popleft_n(7)) == [6, 7, 8, 1, 0, 4, 5]
    assert queue.grown() == [2]
    assert queue.grown() == []


def test_a_page_that_was_taken_is_not_grown_before_it_is_given() -> None:
    _, queue = make([(0, 4), (4, 8)], put=[0])
    queue.allow(2)
    queue.take(0)
    assert queue.num_free_blocks == 4
    assert queue.popleft().block_id == 4
    assert queue.num_free_blocks == 3
    queue.give(0)
    assert queue.num_free_blocks == 7


def test_a_short_last_page_counts_for_what_it_has() -> None:
    _, queue = make([(0, 4), (4, 6)])
    queue.allow(5)
    assert queue.num_free_blocks == 6
    queue.popleft_n(5)
    assert (queue.num_free_blocks, queue.grown()) == (1, [0, 1])


def test_a_draining_page_that_empties_is_drained_no_more() -> None:
    _, queue = make([(0, 4), (4, 8)], put=[0, 1])
    first, second, *_ = held = queue.popleft_n(6)
    assert queue.drain(2) == [1, 0]
    queue.append_n([first, second])
    assert queue.is_draining(first)
    assert (queue.num_free_blocks, queue.usage()) == (0, (2, 0, 0, 2))
    queue.append_n(held[2:])
    assert not queue.is_draining(first)
    assert (queue.num_free_blocks, queue.usage()) == (8, (0, 2, 0, 0))


def test_draining_pages_stay_so_while_others_get_emptier() -> None:
    _, queue = make([(0, 4), (4, 8), (8, 12)], put=[0, 1, 2])
    held = queue.popleft_n(12)
    queue.append(held[0])
    assert queue.drain(1) == [0]
    queue.append_n(held[4:7])
    assert queue.drain(1) == []
    assert queue.drain(2) == [1]
    assert queue.drain(2, keep=(0,)) == [2]
    assert queue.drain(0) == []
    assert queue.usage() == (3, 0, 0, 0)


def test_iterating_goes_on_from_the_cursor_while_blocks_come_and_go() -> None:
    blocks, queue = make([(0, 8)], put=[0])
    walk = queue.iter_blocks_after(blocks[2])
    assert next(walk).block_id == 3
    queue.remove(blocks[4])
    assert next(walk).block_id == 5
    queue.remove(blocks[5])
    assert list(walk) == []
    assert list(queue.iter_blocks_after(blocks[5])) == []
    assert ids(list(queue.iter_blocks_after(blocks[3]))) == [6, 7]


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ([(0, 4), (3, 8)], "page 1 has blocks 3 to 8"),
        ([(4, 2)], "page 0 has blocks 4 to 2"),
        ([(-1, 2)], "page 0 has blocks -1 to 2"),
        ([(0, BLOCKS + 1)], "page 0 has blocks 0 to 26"),
    ],
)
def test_pages_that_cannot_be(pages: list[tuple[int, int]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make(pages)


@pytest.mark.parametrize("pages", [5, [5], [(1, 2, 3)], [("a", "b")], [(0, 2**40)]])
def test_pages_that_are_none(pages: object) -> None:
    with pytest.raises(TypeError, match="pages: expected"):
        PageQueue([], pages)  # type: ignore[arg-type]


def test_blocks_that_cannot_be() -> None:
    one = Block(0)
    for blocks in ([Block(1)], [one, one], [Block(-1)], [Block(2**62)]):
        with pytest.raises(ValueError, match="expected the block with block_id"):
            PageQueue(blocks, [])
    with pytest.raises(AttributeError, match="block_id"):
        PageQueue([object()], [])
    with pytest.raises(TypeError):
        PageQueue([Block("x")], [])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        PageQueue(5, [])  # type: ignore[arg-type]


def test_a_block_of_another_queue_is_refused() -> None:
    _, queue = make(put=[0])
    queue.popleft()
    stranger = Block(0)
    for use in (queue.append, queue.remove, queue.is_draining, queue.iter_blocks_after):
        with pytest.raises(ValueError, match=r"Block\(block_id=0\) is no block of this queue"):
            use(stranger)
    with pytest.raises(ValueError, match="no block of this queue"):
        queue.append_n([stranger])
    del stranger.block_id
    with pytest.raises(AttributeError):
        queue.append(stranger)
    queue.check()


def test_numbers_that_cannot_be() -> None:
    _, queue = make()
    for use in (queue.popleft_n, queue.allow, queue.victims, queue.drain):
        with pytest.raises(ValueError, match="-1"):
            use(-1)
    for on_page in (queue.put, queue.take, queue.give, queue.used_blocks, queue.in_circulation):
        for page in (-1, len(PAGES), 2**40):
            with pytest.raises(ValueError, match=f"no page {page}"):
                on_page(page)
    with pytest.raises(ValueError, match="no page 99"):
        queue.drain(0, (99,))
    with pytest.raises(ValueError, match="0 are free"):
        queue.popleft()
    with pytest.raises(TypeError):
        queue.popleft_n("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        queue.for_running = 1  # type: ignore[assignment]


def test_a_list_that_shrinks_while_it_is_read() -> None:
    class Treacherous(LooseBlock):
        @property
        def block_id(self) -> int:
            batch.clear()
            return self.number

    batch: list[Treacherous] = []
    blocks = [Treacherous(number) for number in range(4)]
    queue = PageQueue(blocks, [(0, 4)])
    queue.put(0)
    batch += queue.popleft_n(4)
    with pytest.raises(ValueError, match="changed while"):
        queue.append_n(batch)
    assert queue.num_used_blocks == 4
    queue.check()


def test_a_pool_that_its_blocks_point_back_to_is_collected() -> None:
    class Pool:
        queue: PageQueue
        walk: Iterator["PoolBlock"]

    class PoolBlock:
        def __init__(self, block_id: int, pool: Pool) -> None:
            self.block_id = block_id
            self.pool = pool

    pool = Pool()
    pool.queue = PageQueue([PoolBlock(number, pool) for number in range(4)], [(0, 4)])
    pool.walk = pool.queue.iter_blocks_after(None)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_blocks_live_as_long_as_the_queue_and_no_longer() -> None:
    class Kept:
        def __init__(self, block_id: int) -> None:
            self.block_id = block_id

    blocks = [Kept(number) for number in range(4)]
    gone = weakref.ref(blocks[0])
    queue = PageQueue(blocks, [(0, 4)])
    del blocks
    queue.put(0)
    for _ in range(3):
        queue.append_n(queue.popleft_n(4))
        queue.append(queue.popleft())
        queue.get_all_free_blocks()
        list(queue.iter_blocks_after(None))
        queue.take(0)
        queue.give(0)
        queue.put(0)
    assert gone() is not None
    del queue
    assert gone() is None
