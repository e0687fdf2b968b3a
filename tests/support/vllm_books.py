"""Walks the books of a real vLLM under kvquota, on its engine thread: blocks, hashes, pages and memory.

Each check returns what is wrong, one line each.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvquota.agent.balloon import BalloonStatistics


def install() -> None:
    """Make the checks methods of EngineCore, which clients may then call by name."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, "check_blocks", _core_blocks)  # noqa: B010
    setattr(EngineCore, "check_books", _core_books)  # noqa: B010


def check_blocks(pool: Any, ranges: Sequence[tuple[int, int]], tables: Iterable[Iterable[Any]]) -> list[str]:
    """Of a pool whose blocks page p has are `ranges[p]`, and the block tables of all that holds blocks."""
    queue = pool.free_block_queue
    try:
        queue.check()
    except AssertionError as error:
        return [f"the page queue: {error}"]
    return [
        *_references(pool, ranges, Counter(block.block_id for table in tables for block in table)),
        *_hashes(pool, ranges),
    ]


def _references(pool: Any, ranges: Sequence[tuple[int, int]], held: Counter[int]) -> Iterator[str]:
    """Every block is exactly one of: in use, free, withheld."""
    queue = pool.free_block_queue
    free = _free(queue)
    null = pool.null_block
    if null is not pool.blocks[0] or not null.is_null or null.block_id in free:
        yield f"the null block is {null}, and {'free' if null.block_id in free else 'in use'}"
    used = 0
    for block, page in _paged(pool, ranges):
        name = f"block {block.block_id} of page {page}"
        tables = held[block.block_id]
        if block is null:
            # Its page is gone while the KV cache sleeps.
            used += queue.in_circulation(0)
        elif page is None or not queue.in_circulation(page):
            if block.ref_cnt != 1 or tables or block.block_id in free:
                yield f"{name} is withheld: {block.ref_cnt} references, in {tables} tables"
        elif block.ref_cnt != tables:
            yield f"{name} has {block.ref_cnt} references, and is in {tables} tables"
        elif not queue.is_draining(block) and (block.ref_cnt == 0) != (block.block_id in free):
            yield f"{name} has {block.ref_cnt} references, and free is {block.block_id in free}"
        else:
            used += block.ref_cnt > 0
    if used != queue.num_used_blocks:
        yield f"the queue counts {queue.num_used_blocks} used blocks: there are {used}"


def _hashes(pool: Any, ranges: Sequence[tuple[int, int]]) -> Iterator[str]:
    """A hash leads to the blocks that carry it, none of them withheld or draining, and none without."""
    queue = pool.free_block_queue
    led: set[tuple[Any, int]] = set()
    for key, found in pool.cached_block_hash_to_block._cache.items():
        for block in found.values() if isinstance(found, dict) else (found,):
            led.add((key, block.block_id))
            if pool.blocks[block.block_id] is not block:
                yield f"a hash leads to a block {block.block_id} that is none of the pool's"
    carried: set[tuple[Any, int]] = set()
    for block, page in _paged(pool, ranges):
        keys = {*pool.cached_block_hashes_by_block.get(block.block_id, ())}
        if block.block_hash is not None:
            keys.add(block.block_hash)
        carried.update((key, block.block_id) for key in keys)
        if keys and (page is None or not queue.in_circulation(page)):
            yield f"block {block.block_id} of page {page} is withheld, and cached"
        elif keys and queue.is_draining(block):
            yield f"block {block.block_id} of page {page} is draining, and cached"
    yield from (f"a hash leads to block {block}, which does not carry it" for _, block in led - carried)
    yield from (f"block {block} carries a hash that does not lead to it" for _, block in carried - led)


def _free(queue: Any) -> set[int]:
    """All free blocks in circulation but for those of draining pages."""
    return {block.block_id for block in queue.get_all_free_blocks()}


def _paged(pool: Any, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[Any, int | None]]:
    """Every block with its page; None for one that straddles two."""
    pages = {block: page for page, (first, end) in enumerate(ranges) for block in range(first, end)}
    return ((block, pages.get(block.block_id)) for block in pool.blocks)


@dataclass(frozen=True)
class RankBooks:
    """What a rank says of its arena, and what the kernel counts in its memfd."""

    mapped: int
    unmapped: int
    credits: int
    held_bytes: int
    page_bytes: int
    memfd_bytes: int
    faults: int


def check_pages(
    books: BalloonStatistics, circulating: int, usage: tuple[int, int, int, int], ranks: Sequence[RankBooks]
) -> list[str]:
    """Of an engine at rest, whose free list has `circulating` pages in circulation, and says `usage`."""
    pinned, evictable, empty, draining = usage
    pairs = [
        ("pinned pages", books.pinned_pages, pinned),
        ("evictable pages", books.evictable_pages, evictable),
        ("warm pages", books.warm_pages, empty + books.credits),
        ("draining pages", books.draining_pages, draining),
        ("pages in circulation", pinned + evictable + empty, circulating),
        ("retiring pages", books.retiring_pages, 0),
        ("quarantined pages", books.quarantined_pages, 0),
        ("mapped pages", books.mapped_pages, circulating + books.credits),
        ("pages mapped and not unmapped", books.pages_mapped - books.pages_unmapped, circulating),
        ("page bytes", books.page_bytes, sum(rank.page_bytes for rank in ranks)),
    ]
    for number, rank in enumerate(ranks):
        pairs += [
            (f"pages mapped on rank {number}", rank.mapped - rank.unmapped, circulating),
            (f"credits on rank {number}", rank.credits, books.credits),
            (f"bytes held by rank {number}", rank.held_bytes, books.mapped_pages * rank.page_bytes),
            (f"bytes in the memfd of rank {number}", rank.memfd_bytes, rank.held_bytes),
            (f"faults on rank {number}", rank.faults, 0),
        ]
    return [f"{what}: {one} and {other}" for what, one, other in pairs if one != other]


# What follows runs in an engine's processes.


def _core_blocks(core: Any) -> list[str]:
    scheduler = core.scheduler
    manager = scheduler.kv_cache_manager
    held = [single.req_to_blocks for single in manager.coordinator.single_type_managers]
    holding = {request for tables in held for request, blocks in tables.items() if blocks}
    tables = [blocks for tables in held for blocks in tables.values()]
    tables += [blocks for _, blocks in scheduler.deferred_frees]
    adapter = scheduler._adapter
    return [
        *check_blocks(manager.block_pool, adapter._ranges, tables),
        *(
            f"request {request} is over, and holds blocks"
            for request in sorted(holding - {*scheduler.requests})
        ),
    ]


def _core_books(core: Any) -> list[str]:
    scheduler = core.scheduler
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    pages = len(scheduler._adapter._ranges)
    circulating = sum(queue.in_circulation(page) for page in range(pages))
    books = scheduler._agent.statistics()
    ranks = [RankBooks(*rank) for rank in core.model_executor.collective_rpc(_rank_books)]
    faults = _core_blocks(core) + check_pages(books, circulating, queue.usage(), ranks)
    if scheduler.requests or queue.num_used_blocks != queue.in_circulation(0):
        faults.append(f"at rest: {len(scheduler.requests)} requests, {queue.num_used_blocks} blocks in use")
    return faults


def _rank_books(worker: Any) -> tuple[int, ...]:
    buffer = worker._buffer
    report = buffer.arena.report()
    return (
        report.mapped,
        report.unmapped,
        report.created - report.mapped - report.dropped,
        report.held_bytes,
        buffer.arena.page_bytes,
        os.fstat(buffer.driver.fileno()).st_blocks * 512,
        len(report.faults),
    )
