"""vLLM's block pool and KV cache manager, once their free list is a PageQueue."""

from typing import Any

from kvquota.agent.engines.vllm.adapter import VllmAdapter
from kvquota.native import PageQueue
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request, RequestStatus


class ElasticBlockPool(BlockPool):
    """A pool whose blocks come and go with their pages. A withheld block looks held, and has no hash."""

    free_block_queue: PageQueue
    adapter: VllmAdapter

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks in use and free ones: whether a reset may go ahead depends on what lies between."""
        queue = self.free_block_queue
        return queue.num_used_blocks + queue.num_free_blocks

    def get_usage(self) -> float:
        """The part in use of what the limit allows, from 0 to 1, the null block aside."""
        usable = self.adapter.usable_blocks() - 1
        return (self.free_block_queue.num_used_blocks - 1) / usable if usable else 0.0

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

    def _forget_if_draining(self, block: Any) -> None:
        if self.free_block_queue.is_draining(block):
            self._maybe_evict_cached_block(block)


class ElasticKVCacheManager(KVCacheManager):
    """Tells the queue for whom it allocates, and the adapter what was refused."""

    adapter: VllmAdapter
    watermark: float

    @property
    def watermark_blocks(self) -> int:
        """The watermark, as a fraction of what the limit allows."""
        return int(self.watermark * self.adapter.usable_blocks())

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """As vLLM, but a running request asks for more pages before the engine preempts one."""
        running = request.status == RequestStatus.RUNNING
        self.block_pool.free_block_queue.for_running = running
        blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if blocks is None and self.adapter.refuse(self._missing(request, num_new_tokens), running=running):
            blocks = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        return blocks

    def _missing(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that `request` lacked; at least 1. A prefix that hits is not subtracted."""
        tokens = max(request.num_tokens, request.num_computed_tokens + num_new_tokens)
        lacking = 0
        for manager in self.coordinator.single_type_managers:
            held = len(manager.req_to_blocks.get(request.request_id, ()))
            lacking += max(0, -(-tokens // manager.block_size) - held)
        free: int = self.block_pool.get_num_free_blocks()
        return max(1, lacking - free)
