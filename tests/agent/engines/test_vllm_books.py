"""The checker of a chaos run's end finds what is planted: on vLLM's own pool over a page queue, no engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvquota.agent.balloon import BalloonStatistics
from kvquota.native.status import Reason, Status

from tests.support.vllm_books import RankBooks, check_blocks, check_pages
from tests.support.vllm_pool import GEOMETRY, Rig

pytestmark = pytest.mark.vllm

IN_USE, FREE, CACHED, DRAINING, WITHHELD = 1, 7, 8, 16, 24


class Scene:
    """Page 0 with the null block and one in use, page 1 cached, page 2 draining, page 3 withheld."""

    def __init__(self) -> None:
        self.rig = Rig(circulating=3)
        self.pool = self.rig.pool
        head, middle, tail = (self.rig.use(count, cached=False) for count in (7, 8, 8))
        for block in middle:
            self.pool._insert_block_hash(b"hash%d" % block.block_id + bytes(4), block, 16)
        self.pool.free_blocks(middle)
        self.pool.free_blocks(head[1:])
        self.pool.free_blocks(tail[1:])
        self.rig.adapter.drain(1)
        if not self.rig.queue.is_draining(tail[0]):
            raise AssertionError("page 2 should drain")
        self.tables = [[self.pool.null_block, head[0]], [tail[0]]]

    def faults(self) -> list[str]:
        return check_blocks(self.pool, GEOMETRY.ranges(), self.tables)

    def block(self, number: int) -> Any:
        return self.pool.blocks[number]

    def hash(self, number: int) -> None:
        self.pool._insert_block_hash(b"planted" + bytes(4), self.block(number), 16)


def lose_reference(scene: Scene) -> None:
    scene.block(IN_USE).ref_cnt = 0


def leak(scene: Scene) -> None:
    scene.rig.use(1, cached=False)


def free_in_use(scene: Scene) -> None:
    scene.rig.queue.append(scene.block(IN_USE))


def use_withheld(scene: Scene) -> None:
    scene.tables.append([scene.block(WITHHELD)])


def hash_withheld(scene: Scene) -> None:
    scene.hash(WITHHELD)


def hash_draining(scene: Scene) -> None:
    scene.hash(DRAINING)


def forget_hash(scene: Scene) -> None:
    scene.block(CACHED).reset_hash()


def hash_without_block(scene: Scene) -> None:
    scene.pool.cached_block_hash_to_block._cache.clear()


def other_null_block(scene: Scene) -> None:
    scene.pool.null_block = scene.block(IN_USE)


PLANTED: dict[Callable[[Scene], None], str] = {
    lose_reference: "block 1 of page 0 has 0 references, and is in 1 tables",
    leak: "has 1 references, and is in 0 tables",
    free_in_use: "the page queue: block 1 is free: ref_cnt 1, expected 0",
    use_withheld: "block 24 of page 3 is withheld: 1 references, in 1 tables",
    hash_withheld: "block 24 of page 3 is withheld, and cached",
    hash_draining: "block 16 of page 2 is draining, and cached",
    forget_hash: "a hash leads to block 8, which does not carry it",
    hash_without_block: "block 8 carries a hash that does not lead to it",
    other_null_block: "the null block is",
}


@pytest.mark.usefixtures("vllm_imported")
@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_among_the_blocks_is_found(plant: Callable[[Scene], None]) -> None:
    scene = Scene()
    assert scene.faults() == []
    plant(scene)
    assert [fault for fault in scene.faults() if PLANTED[plant] in fault]


BOOKS = BalloonStatistics(
    status=Status.APPLIED,
    reason=Reason.NONE,
    revision_decided=1,
    revision_applied=1,
    decided_at_ns=0,
    applied_at_ns=0,
    limit_bytes=None,
    page_bytes=100,
    capacity_pages=9,
    floor_pages=1,
    target_pages=9,
    mapped_pages=7,
    pinned_pages=1,
    draining_pages=0,
    evictable_pages=3,
    warm_pages=3,
    retiring_pages=0,
    quarantined_pages=0,
    credits=2,
    pages_mapped=12,
    pages_unmapped=7,
    passes=1,
    ranks=1,
    ranks_lost=0,
)
RANK = RankBooks(mapped=12, unmapped=7, credits=2, held_bytes=700, page_bytes=100, memfd_bytes=700, faults=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pinned_pages", 2), ("evictable_pages", 2), ("warm_pages", 1), ("draining_pages", 1),
        ("retiring_pages", 1), ("quarantined_pages", 1), ("mapped_pages", 8), ("pages_unmapped", 6),
    ],
)  # fmt: skip
def test_what_is_planted_among_the_pages_is_found(field: str, value: int) -> None:
    assert check_pages(BOOKS, 5, (1, 3, 1, 0), [RANK]) == []
    change: dict[str, Any] = {field: value}
    assert check_pages(replace(BOOKS, **change), 5, (1, 3, 1, 0), [RANK])


@pytest.mark.parametrize(
    ("field", "value"),
    [("unmapped", 8), ("credits", 1), ("held_bytes", 800), ("memfd_bytes", 900), ("faults", 1)],
)
def test_what_is_planted_on_a_rank_is_found(field: str, value: int) -> None:
    assert check_pages(BOOKS, 5, (1, 3, 1, 0), [replace(RANK, **{field: value})])
