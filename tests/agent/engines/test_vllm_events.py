"""vLLM's KV events, replayed: they tell exactly what its pool has cached, while pages come and go."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.support.vllm_pool import BLOCK_TOKENS, PAGE_BLOCKS, PAGES, Rig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]

PROMPTS = 8


class Workload:
    """Requests that come and go at random, and whoever reads the events of their blocks."""

    def __init__(self, seed: int) -> None:
        self.rig = Rig()
        self.random = random.Random(seed)
        self.requests: list[list[Any]] = []
        self.taken: list[int] = []
        # By hash: blocks that have it. vLLM tells each of two blocks with one hash.
        self.replayed: Counter[Any] = Counter()
        self.kinds: Counter[str] = Counter()

    def arrive(self) -> None:
        pool, number = self.rig.pool, self.random.randrange(PROMPTS)
        length = self.random.randint(1, PAGE_BLOCKS)
        request = self.rig.request("r", [number * 100 + n for n in range(length * BLOCK_TOKENS)])
        hits: list[Any] = []
        while len(hits) < length - 1 and (hit := pool.get_cached_block(request.block_hashes[len(hits)], [0])):
            hits += hit
        pool.touch(hits)
        self.rig.queue.for_running = self.random.random() < 0.5
        if length - len(hits) > pool.get_num_free_blocks():
            pool.free_blocks(reversed(hits))
        else:
            blocks = hits + pool.get_new_blocks(length - len(hits))
            pool.cache_full_blocks(request, blocks, len(hits), length, BLOCK_TOKENS, 0)
            self.requests.append(blocks)
        self.rig.queue.for_running = False

    def finish(self) -> None:
        if self.requests:
            blocks = self.requests.pop(self.random.randrange(len(self.requests)))
            self.rig.pool.free_blocks(reversed(blocks))

    def shrink(self) -> None:
        self.taken += self.rig.adapter.take(self.random.randint(1, 2))

    def drain(self) -> None:
        self.rig.adapter.drain(self.random.randrange(PAGES))

    def grow(self) -> None:
        self.rig.adapter.give(self.taken)
        for page in self.taken:
            self.rig.queue.put(page)
        self.taken.clear()

    def reset(self) -> None:
        while self.requests:
            self.finish()
        assert self.rig.pool.reset_prefix_cache()

    def replay(self) -> None:
        for event in self.rig.pool.take_events():
            kind = type(event).__name__
            self.kinds[kind] += 1
            if kind == "AllBlocksCleared":
                self.replayed.clear()
                continue
            for key in event.block_hashes:
                self.replayed[key, event.group_idx] += 1 if kind == "BlockStored" else -1

    def cached(self) -> Counter[Any]:
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

        found: Counter[Any] = Counter()
        for key, blocks in self.rig.pool.cached_block_hash_to_block._cache.items():
            held = blocks.values() if isinstance(blocks, dict) else [blocks]
            assert not any(self.rig.queue.is_draining(block) for block in held)
            found[maybe_convert_block_hash(get_block_hash(key)), get_group_id(key)] += len(held)
        return found


@pytest.mark.parametrize("seed", range(8))
def test_replayed_events_are_what_the_pool_has_cached(seed: int) -> None:
    work = Workload(seed)
    steps = [work.arrive, work.finish, work.shrink, work.drain, work.grow, work.reset]
    for step in work.random.choices(steps, [10, 6, 3, 3, 4, 0.3], k=600):
        step()
        work.replay()
        assert +work.replayed == work.cached()
        assert min(work.replayed.values(), default=0) >= 0
    work.rig.queue.check()
    assert work.rig.adapter.counters().blocks_evicted > 20
    assert set(work.kinds) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
