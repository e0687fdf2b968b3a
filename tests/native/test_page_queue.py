import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

import pytest
from kvquota.native import PageQueue

from tests.native.queue_model import BLOCKS, PAGES, Block, ids

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


def make(
    pages: Sequence[tuple[int, int]] = PAGES, *, put: Sequence[int] = ()
) -> tuple[list[Block], PageQueue]:
    blocks = [Block(number) for number in range(BLOCKS)]
    queue = PageQueue(blocks, pages)
    for page in put:
        queue.put(page)
    return blocks, queue


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


def test_what_was_cached_before_a_page_drained_is_not_when_it_drains_no_more() -> None:
    _, queue = make([(0, 4), (4, 8)], put=[0, 1])
    held = queue.popleft_n(8)
    queue.append_n(held[5:7])
    assert queue.drain(1) == [1]
    queue.append(held[7])
    queue.drain(0)
    # The engine dropped the hashes of the first two; the third it freed as cached since.
    assert (queue.num_free_blocks, queue.num_uncached_blocks) == (3, 2)
    queue.prepend_n([held[4]])
    assert ids(queue.take(1)) == [7]


def test_nothing_is_cached_any_more_once_all_is_uncached() -> None:
    _, queue = make([(0, 4), (4, 8), (8, 12)], put=[0, 1, 2])
    held = queue.popleft_n(12)
    queue.prepend_n([held[1]])
    queue.append_n(held[9:])
    assert queue.drain(1) == [2]
    queue.append_n([held[8], *held[6:8], *held[4:6], *held[2:4]])
    queue.drain(1)
    assert queue.usage() == (1, 2, 0, 1)
    queue.uncache_all()
    assert queue.usage() == (1, 0, 2, 1)
    queue.drain(0)
    assert queue.num_uncached_blocks == queue.num_free_blocks == 11
    assert [queue.take(page) for page in queue.victims(2)] == [[], []]
    queue.check()


def test_draining_pages_stay_so_while_others_get_emptier() -> None:
    _, queue = make([(0, 4), (4, 8), (8, 12)], put=[0, 1, 2])
    held = queue.popleft_n(12)
    queue.append(held[0])
    assert queue.drain(1) == [0]
    queue.append_n(held[4:7])
    assert queue.drain(1) == []
    assert queue.drain(2) == [1]
    assert queue.drain(2, keep=(0,)) == [2]
    assert queue.drain(3, keep=(0,)) == [0]
    assert queue.drain(2, keep=(1,)) == []
    assert [page for page in range(3) if queue.is_draining(held[4 * page])] == [0, 2]
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


def test_a_walk_passes_over_draining_pages_and_begins_again_from_one() -> None:
    blocks, queue = make([(0, 4), (4, 8)], put=[0, 1])
    queue.popleft_n(5)
    queue.append_n(blocks[:3])
    assert ids(list(queue.iter_blocks_after(blocks[7]))) == [0, 1, 2]
    assert queue.drain(1) == [1]
    queue.for_running = True
    assert queue.num_free_blocks == 6
    assert ids(list(queue.iter_blocks_after(None))) == [0, 1, 2]
    assert ids(list(queue.iter_blocks_after(blocks[7]))) == [0, 1, 2]


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
    with pytest.raises(ValueError, match="expected the block with block_id 0"):
        PageQueue([Block("x")], [])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        PageQueue(5, [])  # type: ignore[arg-type]


class WithoutCount:
    __slots__ = ("block_id",)


class Loose:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0


class Counted:
    __slots__ = ("__dict__", "block_id")
    ref_cnt = 0


@pytest.mark.parametrize("kind", [object, WithoutCount, Counted, lambda: Loose(0)])
def test_blocks_without_the_slots_it_needs(kind: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="expected a class with block_id and ref_cnt in __slots__"):
        PageQueue([kind()], [])


def test_blocks_of_two_classes() -> None:
    with pytest.raises(TypeError, match="expected all of one class"):
        PageQueue([Block(0), Loose(1)], [])


def test_a_withheld_block_looks_held_and_one_that_comes_into_circulation_does_not() -> None:
    blocks, queue = make([(0, 3), (4, 7), (7, 10)])
    assert [block.ref_cnt for block in blocks] == [1] * BLOCKS
    queue.put(0)
    queue.allow(1)
    # The fourth is of a page that grows for it.
    popped = queue.popleft_n(4)
    assert [block.ref_cnt for block in popped] == [0] * 4
    assert [block.block_id for block in blocks if block.ref_cnt == 0] == [0, 1, 2, 4, 5, 6]
    queue.prepend_n(popped[:3])
    queue.take(0)
    assert [block.block_id for block in blocks if block.ref_cnt == 0] == [4, 5, 6]
    queue.give(0)
    assert blocks[0].ref_cnt == 1
    queue.append(blocks[4])
    queue.popleft_n(3)
    queue.allow(1)
    assert queue.popleft() is blocks[0]
    assert blocks[0].ref_cnt == 0


@pytest.mark.parametrize(
    ("number", "count", "why"), [(9, 0, "withheld: ref_cnt 0"), (1, 1, "free: ref_cnt 1")]
)
def test_a_wrong_count_of_references_is_found(number: int, count: int, why: str) -> None:
    blocks, queue = make(put=[0])
    queue.check()
    blocks[number].ref_cnt = count
    with pytest.raises(AssertionError, match=f"block {number} is {why}"):
        queue.check()


def test_no_count_stays_alive_because_a_block_had_it() -> None:
    blocks, queue = make([(0, 4)], put=[0])
    odd = 2**70
    before = sys.getrefcount(odd)
    blocks[0].ref_cnt = odd
    queue.take(0)
    assert sys.getrefcount(odd) == before
    del blocks[1].ref_cnt
    queue.give(0)
    queue.put(0)
    assert [block.ref_cnt for block in blocks[:4]] == [0] * 4


def test_a_block_of_another_queue_is_refused() -> None:
    _, queue = make(put=[0])
    queue.popleft()
    stranger = Block(0)
    for use in (queue.append, queue.remove, queue.is_draining, queue.iter_blocks_after):
        with pytest.raises(ValueError, match=r"Block\(.*\) is no block of this queue"):
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


def test_a_pool_that_its_blocks_point_back_to_is_collected() -> None:
    class Pool:
        queue: PageQueue
        walk: Iterator["PoolBlock"]

    @dataclass(eq=False, slots=True)
    class PoolBlock:
        block_id: int
        pool: Pool
        ref_cnt: int = 0

    pool = Pool()
    pool.queue = PageQueue([PoolBlock(number, pool) for number in range(4)], [(0, 4)])
    pool.walk = pool.queue.iter_blocks_after(None)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None


def test_blocks_live_as_long_as_the_queue_and_no_longer() -> None:
    class Kept:
        __slots__ = ("__weakref__", "block_id", "ref_cnt")

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
