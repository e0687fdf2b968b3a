"""What the agent needs to know of vLLM's pool and scheduler, and what it does to them."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import vllm
from kvquota.agent.contract import Counters
from kvquota.agent.geometry import Geometry
from kvquota.native import PageQueue
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

# An admission for which no memory came for so long evicts: a rank may hang without being lost.
_PATIENCE_NS = 1_000_000_000


class VllmAdapter:
    """The Adapter of one vLLM scheduler, whose pool has `queue` as its free list."""

    def __init__(
        self, scheduler: Any, geometry: Geometry, queue: PageQueue, wake: Callable[[], None]
    ) -> None:
        self.engine = f"vllm {vllm.__version__}"
        self.usage = queue.usage
        self.allow = queue.allow
        self.grown = queue.grown
        self.wake = wake
        # The agent's, once there is one.
        self.grow_now: Callable[[int], int] = lambda _pages: 0
        self.target_pages: Callable[[], int] = lambda: geometry.pages
        self.room: Callable[[], int] = lambda: 0
        self.ask: Callable[[int], int] = lambda _pages: 0
        # The waiting request that this step refused memory, where vLLM stopped looking at those behind it.
        self.not_admitted: Any = None
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._queue = queue
        self._ranges = geometry.ranges()
        self._page_blocks = max(end - first for first, end in self._ranges)
        managers = self._manager.coordinator.single_type_managers
        self._groups = len(managers)
        self._block_tokens = min(int(manager.block_size) for manager in managers)
        self._plenty = False
        # What the waiting requests lack that the next step may admit: the cache is asked once for each.
        self._lacking: dict[str, tuple[int, int]] = {}
        self._held_back: tuple[Any, int, int] = (None, 0, 0)
        self._missing = 0
        self._wanted = 0
        self._evicted = 0
        self._refused = 0
        self._blocked_ns = 0
        self._blocked_since = 0

    def take(self, pages: int) -> list[int]:
        """Out of circulation, with their cached blocks evicted as vLLM evicts them."""
        victims = self._queue.victims(pages)
        for page in victims:
            self._take(page)
        return victims

    def _take(self, page: int) -> None:
        cached = self._queue.take(page)
        # Blocks that were unpinned are read until they are reused; the pool calls their readers off. One
        # that a request held longer, and that was never cached, is read too.
        if self._pool._reuse_watchers:
            first, end = self._ranges[page]
            self._pool._notify_reuse(self._pool.blocks[first:end])
        self._evict(cached)

    def give(self, pages: Sequence[int]) -> None:
        """Every rank has unmapped them: they may be grown again."""
        for page in pages:
            self._queue.give(page)

    def drain(self, pages: int) -> None:
        """The blocks of a page that starts to drain lose their hashes, those in use too."""
        # The null block's page never goes: before others it would drain in their place.
        for page in self._queue.drain(pages, keep=(0,)):
            first, end = self._ranges[page]
            self._evict(self._pool.blocks[first:end])

    def take_floor(self) -> list[int]:
        """Page 0, with the null block."""
        if self._queue.used_blocks(0) > 1:
            return []
        self._queue.prepend_n([self._pool.null_block])
        self._take(0)
        return [0]

    def put_floor(self) -> None:
        """Page 0, and its null block out of the free list as in a new pool."""
        self._queue.put(0)
        self._queue.remove(self._pool.null_block)

    def _evict(self, blocks: Sequence[Any]) -> None:
        evict = self._pool._maybe_evict_cached_block
        self._evicted += sum(evict(block) for block in blocks)

    def refuse(self, request: Any, missing: int) -> bool:
        """`request` lacked `missing` blocks. True if it should try again: there are pages for it now."""
        self._refused += 1
        self._missing = max(self._missing, missing)
        if request.status == RequestStatus.RUNNING:
            return self.grow_now(self._pages(missing)) > 0
        self.not_admitted = request
        if not self._blocked_since:
            self._blocked_since = time.monotonic_ns()
        return False

    def must_wait(self, request: Any, lacking: int) -> bool:
        """Whether `request`, which lacks so many blocks, should wait for growth rather than evict.

        True only while credits are coming, which wake the engine, and while they are not enough yet. What
        running requests will want stays theirs: they do not wait.
        """
        queue = self._queue
        lacking += self._ahead()
        if lacking <= queue.num_uncached_blocks or not self.room():
            return False
        coming = self.ask(self._pages(lacking - queue.num_uncached_blocks))
        # Some may have come by now.
        missing = lacking - queue.num_uncached_blocks
        if not coming or missing <= 0 or not self._patient(request, missing):
            return False
        self.refuse(request, missing)
        return True

    def _patient(self, request: Any, missing: int) -> bool:
        """Whether memory for `request` came lately, or it has only begun to wait."""
        held_back, least, since = self._held_back
        now = time.monotonic_ns()
        if request is held_back and missing >= least:
            return now - since < _PATIENCE_NS
        self._held_back = (request, missing, now)
        return True

    def begin_scheduling(self) -> None:
        """Forget what the last step refused: what is still refused in this one says so again."""
        self._missing = 0
        self.not_admitted = None
        plenty = self._has_plenty()
        if plenty != self._plenty:
            self._plenty = plenty
            self._manager.leave_to_vllm(plenty)

    def _has_plenty(self) -> bool:
        """Whether the next step admits nobody, and has more free blocks than its requests could take."""
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        if waiting and running < scheduler.max_num_running_reqs:
            return False
        tokens = scheduler.max_num_scheduled_tokens + running * scheduler.num_lookahead_tokens
        most = self._groups * (2 * running + tokens // self._block_tokens)
        return self.usage()[3] == 0 and self._queue.num_free_blocks >= most

    def end_scheduling(self) -> None:
        """Look back at what was refused, and ahead to the next block of each running request."""
        queue = self._queue
        # Free blocks of draining pages are for running requests only: nobody else may count on them.
        queue.for_running = False
        if self._blocked_since and not self._missing:
            self._blocked_ns += time.monotonic_ns() - self._blocked_since
            self._blocked_since = 0
        # Rather a new page than an eviction.
        ahead = self._ahead() + self._queued() - queue.num_uncached_blocks
        self._wanted = self._pages(max(self._missing, ahead, 0))

    def _ahead(self) -> int:
        """Blocks that the running requests will want: for the rest of their prompts, and one more each."""
        scheduler = self._scheduler
        prefills: int = sum(self._manager.lacking(request) for request in scheduler._inflight_prefills)
        return self._groups * len(scheduler.running) + prefills

    def _queued(self) -> int:
        """Blocks that requests lack which the next step may admit: a burst asks for a step's at once."""
        scheduler = self._scheduler
        slots = scheduler.max_num_running_reqs - len(scheduler.running)
        # To look into a queue by priority is to sort it.
        if not scheduler.waiting or slots <= 0 or not isinstance(scheduler.waiting, deque):
            return 0
        if scheduler.pause_state != PauseState.UNPAUSED or not self.room():
            return 0
        before, self._lacking = self._lacking, {}
        tokens = scheduler.max_num_scheduled_tokens
        queued = 0
        for request in islice(scheduler.waiting, slots):
            name = request.request_id
            self._lacking[name] = blocks, new = before.get(name) or self._manager.expect(request)
            queued += blocks
            tokens -= new
            if tokens <= 0:
                break
        return queued

    def _pages(self, blocks: int) -> int:
        return -(-blocks // self._page_blocks)

    def wanted(self) -> int:
        """For the requests that the last step refused, and for the running ones to go on."""
        return self._wanted

    def usable_blocks(self) -> int:
        """Blocks that the limit in force allows, the null block included; never fewer than are in use."""
        return max(self.used_blocks(), self.target_pages() * self._page_blocks)

    def used_blocks(self) -> int:
        """Blocks in use. vLLM counts the null block among them, so it counts while its page is gone too."""
        return self._queue.num_used_blocks + (not self._queue.in_circulation(0))

    def busy(self) -> bool:
        """Whether there are requests."""
        return bool(self._scheduler.requests)

    def counters(self) -> Counters:
        """Waiting requests are blocked where the first of them was refused memory."""
        scheduler = self._scheduler
        _, waiting = scheduler.get_request_counts()
        return Counters(
            requests_waiting=waiting,
            requests_blocked=waiting if self._missing else 0,
            blocks_evicted=self._evicted,
            refused=self._refused,
            blocked_ns=self._blocked_ns,
        )
