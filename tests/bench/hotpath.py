"""What PageQueue costs vLLM's block pool, against vLLM's own queue: `make bench-hotpath`.

Both pools run side by side in one process, in turns, so that whatever else the machine does falls on both.
Times are of CPU, and medians over the turns. Exits with 1 where a ratio is above the bound.
"""

import statistics
import sys
import time
from collections.abc import Callable

from kvquota.native import PageQueue
from vllm.v1.core.block_pool import BlockPool

BLOCKS = 4096
PAGE_BLOCKS = 32
TURNS = 201
BOUND = 1.03


def elastic(pool: BlockPool) -> BlockPool:
    """Put a PageQueue in the place of the pool's own queue, all pages in circulation."""
    pages = BLOCKS // PAGE_BLOCKS
    queue = PageQueue(pool.blocks, [(p * PAGE_BLOCKS, (p + 1) * PAGE_BLOCKS) for p in range(pages)])
    for page in range(pages):
        queue.put(page)
    null_block = queue.popleft()
    assert null_block is pool.null_block
    pool.free_block_queue = queue
    return pool


def cycle(pool: BlockPool, batch: int, repeats: int) -> float:
    """CPU seconds for so many rounds of allocating `batch` blocks and freeing them."""
    start = time.thread_time()
    for _ in range(repeats):
        pool.free_blocks(pool.get_new_blocks(batch))
    return time.thread_time() - start


def touch(pool: BlockPool, batch: int, repeats: int) -> float:
    """CPU seconds for so many rounds of hitting `batch` free blocks and freeing them."""
    blocks = pool.blocks[1 : batch + 1]
    start = time.thread_time()
    for _ in range(repeats):
        pool.touch(blocks)
        pool.free_blocks(blocks)
    return time.thread_time() - start


def main() -> int:
    """Print the table; 1 where a bound is missed."""
    stock = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    ours = elastic(BlockPool(BLOCKS, enable_caching=True, hash_block_size=16))
    cases: list[tuple[str, Callable[[BlockPool, int, int], float], int, int]] = [
        ("allocate and free 1", cycle, 1, 1000),
        ("allocate and free 64", cycle, 64, 40),
        ("hit and free 1", touch, 1, 1000),
        ("hit and free 64", touch, 64, 40),
    ]
    missed = False
    print(f"{'blocks':<22}{'stock us':>10}{'ours us':>10}{'ratio':>8}{'bound':>8}")
    for name, run, batch, repeats in cases:
        times = [(run(stock, batch, repeats), run(ours, batch, repeats)) for _ in range(TURNS)]
        ratio = statistics.median(own / theirs for theirs, own in times)
        theirs, own = (statistics.median(column) / repeats * 1e6 for column in zip(*times, strict=True))
        verdict = "ok" if ratio <= BOUND else "MISSED"
        missed |= ratio > BOUND
        print(f"{name:<22}{theirs:>10.2f}{own:>10.2f}{ratio:>8.2f}{BOUND:>8.2f}  {verdict}")
    ours.free_block_queue.check()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
