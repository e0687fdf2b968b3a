"""vLLM's own block pool over a PageQueue: what is taken and drained leaves it as vLLM's own evictions do."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from kvquota.agent.geometry import Geometry
from kvquota.native import PageQueue

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]

MIB = 1 << 20
PAGES = 4
PAGE_BLOCKS = 8
GEOMETRY = Geometry(unit=MIB // 4, span=2 * MIB, blocks=PAGES * PAGE_BLOCKS)


@pytest.fixture(scope="module")
def vllm_imported() -> None:
    importlib.import_module("tests.support.vllm_imports")


class Rig:
    """A pool with every page in circulation, and the adapter over it."""

    def __init__(self) -> None:
        from kvquota.agent.engines.vllm.adapter import VllmAdapter
        from kvquota.agent.engines.vllm.pool import ElasticBlockPool
        from vllm.v1.core.block_pool import BlockPool

        self.pool: Any = BlockPool(GEOMETRY.blocks, True, 16, enable_kv_cache_events=True)
        self.queue = PageQueue(self.pool.blocks, GEOMETRY.ranges())
        for page in range(PAGES):
            self.queue.put(page)
        self.queue.remove(self.pool.null_block)
        self.pool.free_block_queue = self.queue
        self.pool.__class__ = ElasticBlockPool
        coordinator = SimpleNamespace(single_type_managers=(None,))
        manager = SimpleNamespace(block_pool=self.pool, coordinator=coordinator)
        self.running: list[object] = []
        scheduler = SimpleNamespace(
            kv_cache_manager=manager, requests={}, running=self.running, waiting=[], kv_holding_waiting=[]
        )
        self.adapter = VllmAdapter(scheduler, GEOMETRY, self.queue, lambda: None)
        self.pool.adapter = self.adapter

    def use(self, count: int, *, cached: bool = True) -> list[Any]:
        blocks: list[Any] = self.pool.get_new_blocks(count)
        if cached:
            for block in blocks:
                self.pool._insert_block_hash(b"hash%d" % block.block_id + bytes(4), block, 16)
        return blocks

    def removed(self) -> int:
        from vllm.distributed.kv_events import BlockRemoved

        return sum(isinstance(event, BlockRemoved) for event in self.pool.take_events())


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
