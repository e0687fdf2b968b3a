"""vLLM's own block pool over a PageQueue: what is taken and drained leaves it as vLLM's own evictions do."""

import pytest
from kvquota.agent.geometry import Geometry

from tests.support.vllm_pool import BLOCK_TOKENS, GEOMETRY, MIB, PAGE_BLOCKS, PAGES, Rig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]


def test_taking_a_page_evicts_what_it_cached_with_its_events() -> None:
    rig = Rig()
    rig.pool.free_blocks(rig.use(20))
    assert len(rig.pool.cached_block_hash_to_block) == 20
    # Empty ones first, then the highest of those used last. Page 0 has 7 of the blocks, page 1 has 8.
    assert rig.adapter.take(2) == [3, 2]
    assert rig.removed() == rig.adapter.counters().blocks_evicted == 5
    assert len(rig.pool.cached_block_hash_to_block) == 15
    rig.queue.check()


def test_readers_of_an_unpinned_block_are_called_off_when_its_page_is_taken() -> None:
    rig = Rig()
    told: list[int] = []
    blocks = rig.use(PAGES * PAGE_BLOCKS - 1, cached=False)
    rig.pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    (page,) = rig.adapter.take(1)
    assert sorted(told) == list(range(*GEOMETRY.ranges()[page]))


def test_a_draining_page_loses_its_hashes_and_gets_no_new_ones() -> None:
    rig = Rig()
    used = rig.use(PAGES * PAGE_BLOCKS - 1)
    rig.adapter.drain(2)
    assert rig.queue.usage()[3] == 2
    kept = [block for block in used if not rig.queue.is_draining(block)]
    assert len(rig.pool.cached_block_hash_to_block) == len(kept)
    assert rig.removed() == len(used) - len(kept)
    rig.pool.free_blocks(used)
    assert rig.queue.usage() == (1, 1, 2, 0)


def test_a_reset_goes_ahead_with_withheld_pages_but_not_with_used_blocks() -> None:
    rig = Rig()
    used = rig.use(3)
    rig.adapter.take(2)
    assert not rig.pool.reset_prefix_cache()
    rig.pool.free_blocks(used)
    assert rig.pool.reset_prefix_cache()
    assert len(rig.pool.cached_block_hash_to_block) == 0


def test_pages_are_empty_after_a_reset() -> None:
    rig = Rig(circulating=PAGES - 1)
    rig.pool.free_blocks(rig.use((PAGES - 1) * PAGE_BLOCKS - 1))
    assert rig.queue.usage() == (1, PAGES - 2, 0, 0)
    assert rig.queue.num_uncached_blocks == 0
    assert rig.pool.reset_prefix_cache()
    assert rig.queue.usage() == (1, 0, PAGES - 2, 0)
    assert rig.queue.num_uncached_blocks == (PAGES - 1) * PAGE_BLOCKS - 1
    # They are used before a page grows, and go without an eviction.
    rig.queue.allow(1)
    rig.pool.free_blocks(rig.use(PAGE_BLOCKS, cached=False))
    assert rig.queue.grown() == []
    assert len(rig.adapter.take(PAGES)) == PAGES - 2
    assert rig.adapter.counters().blocks_evicted == 0
    rig.queue.check()


def test_a_reset_that_is_refused_leaves_what_is_cached() -> None:
    rig = Rig()
    used = rig.use(PAGE_BLOCKS)
    rig.pool.free_blocks(used[1:])
    uncached = rig.queue.num_uncached_blocks
    assert not rig.pool.reset_prefix_cache()
    assert rig.queue.num_uncached_blocks == uncached


def test_usage_is_of_what_the_limit_allows() -> None:
    rig = Rig()
    rig.use(7)
    rig.adapter.target_pages = lambda: 2
    assert rig.pool.get_usage() == pytest.approx(7 / 15)
    rig.adapter.target_pages = lambda: 1
    assert rig.pool.get_usage() == pytest.approx(1.0)


def test_running_requests_want_their_next_block_before_anything_is_evicted() -> None:
    rig = Rig()
    rig.pool.free_blocks(rig.use(PAGES * PAGE_BLOCKS - 1))
    assert rig.adapter.wanted() == 0
    rig.running.extend([object()] * 3)
    rig.adapter.begin_scheduling()
    rig.adapter.end_scheduling()
    assert rig.adapter.wanted() == 1


def test_a_partly_filled_block_of_a_draining_page_is_not_cached() -> None:
    rig = Rig()
    request = rig.request("r", list(range(2 * BLOCK_TOKENS)))
    (block,) = rig.use(1, cached=False)
    # Half of a block of 32 tokens. All pinned pages drain, the null block's with them.
    half = (request, block, BLOCK_TOKENS, 0, 2 * BLOCK_TOKENS)
    assert rig.pool.cache_partial_block(*half) is not None
    rig.adapter.drain(1)
    assert rig.queue.is_draining(block)
    assert block.block_hash is None
    assert rig.pool.cache_partial_block(*half) is None
    assert rig.pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert rig.pool.is_block_writable(block)
    rig.adapter.drain(0)
    assert rig.pool.cache_partial_block(*half) is not None
    assert rig.pool.get_cached_block(request.block_hashes[0], [0]) == [block]


def test_a_hit_from_before_the_drain_keeps_a_page_only_as_long_as_it_runs() -> None:
    rig = Rig()
    request = rig.request("r", list(range(4 * BLOCK_TOKENS)))
    rig.use(PAGE_BLOCKS - 1, cached=False)
    blocks = rig.use(4, cached=False)
    rig.pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_TOKENS, 0)
    rig.pool.touch(blocks)
    rig.pool.free_blocks(blocks)
    rig.adapter.drain(1)
    assert rig.queue.is_draining(blocks[0])
    # What the hit request computes there later is not cached either.
    rig.pool.cache_full_blocks(request, blocks, 2, 4, BLOCK_TOKENS, 0)
    assert not any(rig.pool.get_cached_block(key, [0]) for key in request.block_hashes)
    assert rig.queue.usage()[3] == 1
    rig.pool.free_blocks(blocks)
    assert rig.queue.usage() == (1, 0, 3, 0)
    rig.queue.check()


def test_hashes_that_move_to_a_draining_page_are_dropped() -> None:
    rig = Rig()
    used = rig.use(PAGE_BLOCKS + 1, cached=False)
    kept, leaving = used[0], used[-1]
    rig.pool._insert_block_hash(b"hash" + bytes(4), kept, BLOCK_TOKENS)
    rig.pool.move_block_hashes(kept, used[1])
    assert used[1].block_hash is not None
    rig.adapter.drain(1)
    assert rig.queue.is_draining(leaving)
    rig.pool.move_block_hashes(used[1], leaving)
    assert len(rig.pool.cached_block_hash_to_block) == 0
    assert leaving.block_hash is None
    assert rig.removed() == 1


def test_readers_of_an_unpinned_block_of_a_draining_page_are_called_off_when_it_goes() -> None:
    rig = Rig()
    told: list[int] = []
    rig.use(PAGE_BLOCKS - 1, cached=False)
    blocks = rig.use(2, cached=False)
    rig.adapter.drain(1)
    rig.pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    # Free, and still read: the page drains no more, and goes after the empty ones.
    assert rig.queue.usage() == (1, 1, 2, 0)
    rig.adapter.take(2)
    assert told == []
    rig.adapter.take(1)
    assert sorted(told) == [block.block_id for block in blocks]
    rig.queue.check()


def test_free_blocks_are_walked_in_the_order_in_which_they_are_handed_out() -> None:
    rig = Rig()
    used = rig.use(12)
    rig.pool.free_blocks(used[:6])
    rig.pool.unpin_blocks(used[9:], lambda _block: None)
    rig.adapter.drain(1)
    walked = list(rig.queue.iter_blocks_after(None))
    assert walked == rig.queue.get_all_free_blocks()
    assert list(rig.queue.iter_blocks_after(walked[4])) == walked[5:]
    assert rig.pool.get_new_blocks(len(walked)) == walked
    # A block that is not free has nothing behind it.
    assert list(rig.queue.iter_blocks_after(walked[0])) == []


def test_a_withheld_block_looks_held_until_its_page_grows_again() -> None:
    rig = Rig(circulating=1)
    pool = rig.pool
    assert pool.null_block.ref_cnt == 0
    free = PAGE_BLOCKS - 1
    assert [block.ref_cnt for block in pool.blocks] == [0] * PAGE_BLOCKS + [1] * 3 * PAGE_BLOCKS
    rig.queue.allow(1)
    # vLLM takes the reference itself, of blocks of the page in circulation and of the one that grows.
    used = rig.use(free + 1)
    assert [block.ref_cnt for block in used] == [1] * len(used)
    assert rig.queue.grown() == [1]
    pool.free_blocks(used)
    (page,) = rig.adapter.take(1)
    assert page == 1
    withheld = pool.blocks[PAGE_BLOCKS : 2 * PAGE_BLOCKS]
    assert [block.ref_cnt for block in withheld] == [1] * PAGE_BLOCKS
    assert all(block.block_hash is None for block in withheld)
    rig.adapter.give([page])
    rig.queue.allow(1)
    again = pool.get_new_blocks(free + 1)
    assert [block.ref_cnt for block in again] == [1] * len(again)
    pool.free_blocks(again)
    rig.queue.check()


def test_a_block_that_straddles_two_pages_looks_held_for_ever() -> None:
    geometry = Geometry(unit=MIB + MIB // 16, span=16 * MIB, blocks=64)
    rig = Rig(geometry, circulating=geometry.pages)
    inside = {number for first, end in geometry.ranges() for number in range(first, end)}
    straddlers = [block for block in rig.pool.blocks if block.block_id not in inside]
    assert straddlers
    for _ in range(3):
        rig.pool.free_blocks(rig.use(len(inside) - 1))
        pages = rig.adapter.take(geometry.pages)
        rig.adapter.give(pages)
        for page in pages:
            rig.queue.put(page)
        assert [block.ref_cnt for block in straddlers] == [1] * len(straddlers)
        rig.queue.check()


def test_an_offload_cursor_on_a_block_that_was_taken_is_seen_to_be_stale() -> None:
    rig = Rig()
    rig.pool.free_blocks(rig.use(PAGES * PAGE_BLOCKS - 1))
    cursor = rig.queue.get_all_free_blocks()[-1]
    assert cursor.ref_cnt == 0
    assert set(rig.adapter.take(PAGES - 1)) == {1, 2, 3}
    # The lazy offload looks at just this before it walks on from there.
    assert (cursor.block_id >= PAGE_BLOCKS, cursor.ref_cnt) == (True, 1)


def test_an_offload_cursor_on_a_draining_page_sees_what_is_freed_later() -> None:
    rig = Rig()
    used = rig.use(PAGES * PAGE_BLOCKS - 1)
    rig.pool.free_blocks(used[:1] + used[-1:])
    cursor = rig.queue.get_all_free_blocks()[-1]
    rig.adapter.drain(2)
    assert rig.queue.is_draining(cursor)
    later = [block for block in used[1:-1] if not rig.queue.is_draining(block)][:3]
    rig.pool.free_blocks(later)
    assert list(rig.queue.iter_blocks_after(cursor))[-3:] == later


def test_readers_of_a_block_that_was_unpinned_before_its_last_use_are_called_off_too() -> None:
    rig = Rig()
    told: list[int] = []
    rig.use(PAGE_BLOCKS - 1, cached=False)
    (block,) = rig.use(1, cached=False)
    rig.pool.touch([block])
    rig.pool.unpin_blocks([block], lambda block: told.append(block.block_id))
    # The other request frees a block that holds nothing of the cache: its page is an empty one.
    rig.pool.free_blocks([block])
    assert rig.queue.usage() == (1, 0, 3, 0)
    rig.adapter.take(3)
    assert told == [block.block_id]


def test_the_null_blocks_page_drains_only_where_all_pinned_pages_do() -> None:
    rig = Rig()
    used = rig.use(3 * PAGE_BLOCKS, cached=False)
    pinned = rig.queue.usage()[0]
    # Emptiest of all once the others are gone: it would drain first, and for ever.
    rig.pool.free_blocks([block for block in used if block.block_id in range(*GEOMETRY.ranges()[0])])
    assert rig.queue.used_blocks(0) == 1
    assert pinned > 2
    rig.adapter.drain(pinned - 1)
    assert not rig.queue.is_draining(rig.pool.null_block)
    assert rig.queue.usage()[3] == pinned - 1
    rig.adapter.drain(pinned)
    assert rig.queue.is_draining(rig.pool.null_block)
    rig.adapter.drain(1)
    assert not rig.queue.is_draining(rig.pool.null_block)
