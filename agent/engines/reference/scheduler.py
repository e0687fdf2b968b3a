"""Continuous batching over blocks: admission, prefix cache, preemption by recompute. It knows of no quota.

Its free list is a `PageQueue` in both modes. Unmodified, every page is in circulation from the start.
Elastic, the agent decides which pages are, and the scheduler sees a longer or shorter free list.
"""

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvquota.native import PageQueue


@dataclass(eq=False, slots=True)
class Block:
    """One KV block: how many requests (or the balloon) hold it, and its digest in the prefix cache."""

    block_id: int
    ref_cnt: int = 0
    digest: bytes | None = None


@dataclass(eq=False)
class Request:
    """A prompt and what was generated from it. The first `computed` tokens have their KV in `blocks`."""

    prompt: Sequence[int]
    max_tokens: int
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    hit_tokens: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]


class Scheduler:
    """Decides which tokens the next step computes, and in which blocks their KV lives."""

    def __init__(
        self, queue: PageQueue, block_tokens: int, *, batch_tokens: int = 512, max_running: int = 16
    ) -> None:
        self.queue = queue
        self.block_tokens = block_tokens
        self.batch_tokens = batch_tokens
        self.max_running = max_running
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.cached: dict[bytes, Block] = {}
        self.refused = 0
        """Allocations that found too few blocks, since the start."""
        self._starved_since: int | None = None
        self._starved_ns = 0
        self.grow: Callable[[int], object] = lambda _: None
        """Told how many more blocks would save a running request from preemption."""

    def add(self, request: Request) -> None:
        """Queue a request, first come, first served."""
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """Requests of the next step, each with the number of its tokens to compute."""
        work: list[tuple[Request, int]] = []
        budget = self.batch_tokens
        preempted = False
        for request in list(self.running):
            count = min(len(request.tokens) - request.computed, budget)
            while count and request in self.running and not self._extend(request):
                self.preempt(self.running[-1])
                preempted = True
            if count and request in self.running:
                work.append((request, count))
                budget -= count
        starved = preempted and not self.running
        while self.waiting and budget and not preempted and len(self.running) < self.max_running:
            request = self.waiting[0]
            starved = not self._admit(request)
            if starved:
                break
            self.running.append(self.waiting.popleft())
            count = min(len(request.tokens) - request.computed, budget)
            work.append((request, count))
            budget -= count
        self._note(starved)
        return work

    def update(self, work: Iterable[tuple[Request, int]], sampled: Iterable[int]) -> list[Request]:
        """Take in what a step computed. Returns the requests that it finished."""
        finished = []
        for (request, count), token in zip(work, sampled, strict=True):
            self._remember(request, count)
            request.computed += count
            if request.computed == len(request.tokens):
                request.tokens.append(token)
                if len(request.tokens) - len(request.prompt) == request.max_tokens:
                    self.running.remove(request)
                    self._free(request)
                    finished.append(request)
        return finished

    def preempt(self, request: Request) -> None:
        """Free a running request's blocks. It waits, first in the queue, and is computed anew."""
        self.running.remove(request)
        self._free(request)
        request.computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def reset(self) -> None:
        """Empty the prefix cache; only while nothing is running."""
        self.forget(list(self.cached.values()))
        self.queue.uncache_all()

    def forget(self, blocks: Iterable[Block]) -> int:
        """Drop blocks from the prefix cache, used or not. Returns how many were in it."""
        known = [block for block in blocks if block.digest is not None]
        for block in known:
            if block.digest is not None:
                del self.cached[block.digest]
                block.digest = None
        return len(known)

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self.running or self.waiting)

    @property
    def starved(self) -> bool:
        """Whether the last schedule() could not admit the first waiting request for want of blocks."""
        return self._starved_since is not None

    @property
    def starved_ns(self) -> int:
        """How long it was so, in all."""
        since = self._starved_since
        return self._starved_ns + (time.monotonic_ns() - since if since is not None else 0)

    def missing(self) -> int:
        """Blocks that requests will want in the next few steps beyond those they hold."""
        wanted = sum(self._short(request, ahead=self.block_tokens) for request in self.running)
        if self.waiting and len(self.running) < self.max_running:
            wanted += self._short(self.waiting[0])
        return wanted

    def _note(self, starved: bool) -> None:
        if starved and self._starved_since is None:
            self._starved_since = time.monotonic_ns()
        elif not starved and self._starved_since is not None:
            self._starved_ns += time.monotonic_ns() - self._starved_since
            self._starved_since = None

    def _short(self, request: Request, ahead: int = 0) -> int:
        tokens = min(len(request.tokens) + ahead, len(request.prompt) + request.max_tokens)
        return -(-tokens // self.block_tokens) - len(request.blocks)

    def _extend(self, request: Request) -> bool:
        count = self._short(request)
        if not count:
            return True
        self.queue.for_running = True
        try:
            missing = count - self.queue.num_free_blocks
            if missing > 0:
                self.grow(missing)
            if count > self.queue.num_free_blocks:
                self.refused += 1
                return False
            request.blocks += self._allocate(count)
            return True
        finally:
            self.queue.for_running = False

    def _admit(self, request: Request) -> bool:
        hits = self._hits(request)
        free = [block for block in hits if not block.ref_cnt]
        count = self._short(request) - len(hits)
        if count + len(free) > self.queue.num_free_blocks:
            self.refused += 1
            return False
        for block in free:
            self.queue.remove(block)
        for block in hits:
            block.ref_cnt += 1
        request.blocks = hits + self._allocate(count)
        request.computed = len(hits) * self.block_tokens
        if not request.preemptions:
            request.hit_tokens = request.computed
        return True

    def _allocate(self, count: int) -> list[Block]:
        blocks: list[Block] = self.queue.popleft_n(count)
        self.forget(blocks)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def _free(self, request: Request) -> None:
        # The end of a prefix goes before its beginning: without its beginning it cannot be found.
        idle = []
        for block in reversed(request.blocks):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                idle.append(block)
        self.queue.prepend_n([block for block in idle if block.digest is None])
        self.queue.append_n([block for block in idle if block.digest is not None])
        request.blocks = []

    def _hits(self, request: Request) -> list[Block]:
        hits: list[Block] = []
        # One token must be left to compute: its logits are what is wanted.
        for index in range((len(request.tokens) - 1) // self.block_tokens):
            block = self.cached.get(self._digest(request, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _remember(self, request: Request, count: int) -> None:
        end = request.computed + count
        for index in range(request.computed // self.block_tokens, end // self.block_tokens):
            block = request.blocks[index]
            if block.digest is None and not self.queue.is_draining(block):
                digest = self._digest(request, index)
                if digest not in self.cached:
                    block.digest = digest
                    self.cached[digest] = block

    def _digest(self, request: Request, index: int) -> bytes:
        while len(request.digests) <= index:
            start = len(request.digests) * self.block_tokens
            before = request.digests[-1] if request.digests else b""
            tokens = array("I", request.tokens[start : start + self.block_tokens])
            request.digests.append(hashlib.sha256(before + tokens.tobytes()).digest())
        return request.digests[index]
