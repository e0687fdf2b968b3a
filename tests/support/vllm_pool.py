"""vLLM's own block pool over a PageQueue, with the adapter over it and no engine."""

from types import SimpleNamespace
from typing import Any

from kvquota.agent.geometry import Geometry
from kvquota.native import PageQueue

MIB = 1 << 20
PAGES = 4
PAGE_BLOCKS = 8
GEOMETRY = Geometry(unit=MIB // 4, span=2 * MIB, blocks=PAGES * PAGE_BLOCKS)
BLOCK_TOKENS = 16


class Rig:
    """A pool with the first pages in circulation, and the adapter over it."""

    def __init__(self, geometry: Geometry = GEOMETRY, circulating: int = PAGES) -> None:
        from kvquota.agent.engines.vllm.adapter import VllmAdapter
        from kvquota.agent.engines.vllm.pool import ElasticBlockPool
        from vllm.v1.core.block_pool import BlockPool

        self.pool: Any = BlockPool(geometry.blocks, True, BLOCK_TOKENS, enable_kv_cache_events=True)
        self.queue = PageQueue(self.pool.blocks, geometry.ranges())
        for page in range(circulating):
            self.queue.put(page)
        self.queue.remove(self.pool.null_block)
        self.pool.free_block_queue = self.queue
        self.pool.__class__ = ElasticBlockPool
        coordinator = SimpleNamespace(single_type_managers=(SimpleNamespace(block_size=BLOCK_TOKENS),))
        manager = SimpleNamespace(
            block_pool=self.pool, coordinator=coordinator, leave_to_vllm=lambda _alone: None
        )
        self.running: list[object] = []
        self.requests: dict[str, object] = {}
        scheduler = SimpleNamespace(
            kv_cache_manager=manager,
            requests=self.requests,
            running=self.running,
            get_request_counts=lambda: (len(self.running), 0),
            waiting=[],
            _inflight_prefills=set(),
            max_num_running_reqs=16,
            max_num_scheduled_tokens=256,
            num_lookahead_tokens=0,
        )
        self.adapter = VllmAdapter(scheduler, geometry, self.queue, lambda: None)
        self.pool.adapter = self.adapter

    def use(self, count: int, *, cached: bool = True) -> list[Any]:
        blocks: list[Any] = self.pool.get_new_blocks(count)
        if cached:
            for block in blocks:
                self.pool._insert_block_hash(b"hash%d" % block.block_id + bytes(4), block, BLOCK_TOKENS)
        return blocks

    def removed(self) -> int:
        from vllm.distributed.kv_events import BlockRemoved

        return sum(isinstance(event, BlockRemoved) for event in self.pool.take_events())

    def request(self, name: str, tokens: list[int]) -> Any:
        """A request of vLLM's with the hashes of its blocks."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        return Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
