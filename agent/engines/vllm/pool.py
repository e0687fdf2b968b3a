"""vLLM's block pool and KV cache manager, once their free list is a PageQueue."""

from collections.abc import Sequence
from types import MethodType
from typing import Any

from kvquota.agent.engines.vllm import versions
from kvquota.agent.engines.vllm.adapter import VllmAdapter
from kvquota.native import PageQueue
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

Hits = Sequence[Sequence[KVCacheBlock]]


class ElasticBlockPool(BlockPool):
    """A pool whose blocks come and go with their pages. A withheld block looks held, and has no hash."""

    free_block_queue: PageQueue
    adapter: VllmAdapter

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks in use and free ones: whether a reset may go ahead depends on what lies between."""
        return self.adapter.used_blocks() + self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """The part in use of what the limit allows, from 0 to 1, the null block aside."""
        usable = self.adapter.usable_blocks() - 1
        return (self.adapter.used_blocks() - 1) / usable if usable else 0.0

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Cache them, but nothing of a draining page: a hit would keep the page."""
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        if self.free_block_queue.usage()[3]:
            for block in blocks[num_cached_blocks:num_full_blocks]:
                self._forget_if_draining(block)

    def cache_partial_block(self, request: Request, block: Any, *args: Any, **kwargs: Any) -> Any:
        """As cache_full_blocks. None tells vLLM that there is nothing to copy before it writes on."""
        if self.free_block_queue.is_draining(block):
            return None
        return super().cache_partial_block(request, block, *args, **kwargs)

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        """As vLLM, but a draining page takes no hashes over."""
        super().move_block_hashes(src_block, dst_block)
        self._forget_if_draining(dst_block)

    def reset_prefix_cache(self) -> bool:
        """As vLLM, which leaves free blocks where they lie: they hold nothing any more."""
        done: bool = super().reset_prefix_cache()
        if done:
            self.free_block_queue.uncache_all()
        return done

    def _forget_if_draining(self, block: Any) -> None:
        if self.free_block_queue.is_draining(block):
            self._maybe_evict_cached_block(block)


class ElasticKVCacheManager(KVCacheManager):
    """Tells the queue for whom it allocates, and the adapter what was refused."""

    adapter: VllmAdapter
    watermark: float

    @classmethod
    def of(cls, manager: KVCacheManager, watermark: float) -> "ElasticKVCacheManager":
        """`manager`, elastic. A new object: CPython finds the attributes of one that changed class slowly."""
        elastic = cls.__new__(cls)
        for name, value in vars(manager).items():
            if name != "watermark_blocks":
                setattr(elastic, name, value)
        elastic.watermark = watermark
        return elastic

    @property
    def watermark_blocks(self) -> int:
        """The watermark, as a fraction of what the limit allows."""
        return int(self.watermark * self.adapter.usable_blocks())

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """As vLLM, but nothing is evicted or preempted that growth can spare.

        An admission waits for growth that is coming; a running request asks for more pages.
        """
        queue = self.block_pool.free_block_queue
        running = request.status == RequestStatus.RUNNING
        queue.for_running = running
        found = kwargs.get("new_computed_blocks")
        hits = () if found is None else found.blocks
        if not running and self._evictable(hits):
            lacking = self.lacking(request, hits)
            if self.adapter.must_wait(request, lacking):
                return None
        blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is None:
            free = queue.num_free_blocks - _unused(hits)
            missing = max(1, self.lacking(request, hits, num_new_tokens) - free)
            if self.adapter.refuse(request, missing):
                blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        return blocks

    def lacking(self, request: Request, hits: Hits = (), num_new_tokens: int = 0) -> int:
        """Blocks that `request` lacks for its tokens so far and `num_new_tokens` more, beside its `hits`."""
        tokens = max(request.num_tokens, request.num_computed_tokens + num_new_tokens)
        lacking = 0
        for group, manager in enumerate(self.coordinator.single_type_managers):
            needed = -(-tokens // int(manager.block_size))
            if (most := versions.most_blocks(manager)) is not None:
                needed = min(needed, most)
            held = len(manager.req_to_blocks.get(request.request_id, ()))
            found = len(hits[group]) if hits else 0
            lacking += max(0, needed - held - found)
        return lacking

    def leave_to_vllm(self, alone: bool) -> None:
        """Have vLLM's own allocate_slots called while no request can run short: ours takes 1 us of each."""
        if alone:
            setattr(self, "allocate_slots", MethodType(KVCacheManager.allocate_slots, self))  # noqa: B010
        else:
            del self.allocate_slots

    def expect(self, request: Request) -> tuple[int, int]:
        """Blocks that a waiting `request` lacks, and tokens that it computes, beside what the cache has."""
        hits: Hits = ()
        length = request.num_computed_tokens
        if not length and self.prefix_cache_lookup_enabled(request):
            longest = request.num_tokens - 1
            hits, length, _ = self.coordinator.find_longest_cache_hit(request.block_hashes, longest)
        return self.lacking(request, hits), request.num_tokens - length

    def _evictable(self, hits: Hits) -> int:
        """Free cached blocks beside `hits`."""
        queue: PageQueue = self.block_pool.free_block_queue
        return queue.num_free_blocks - queue.num_uncached_blocks - _unused(hits)


def _unused(hits: Hits) -> int:
    """Those of `hits` that no request holds."""
    return sum(block.ref_cnt == 0 for blocks in hits for block in blocks)
