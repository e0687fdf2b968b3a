"""Tensors over an arena, as torch sees them."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvquota.native import Arena, ArenaInUseError, HostDriver
from torch.utils.dlpack import from_dlpack

from tests.native.arenas import GRANULE, ask, done, taken, two_tensors

INT, FLOAT, BFLOAT = 0, 2, 4


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(fill=0xFF)


@pytest.fixture
def arena(driver: HostDriver) -> Iterator[Arena]:
    arena = two_tensors(driver)
    ask(arena, 2)
    arena.apply(1, [0, 1], [])
    yield arena
    gc.collect()
    arena.close()


def tensor(
    arena: Arena, offset: int, shape: list[int], code: int, bits: int, *strides: list[int]
) -> torch.Tensor:
    return from_dlpack(arena.dlpack(offset, shape, code, bits, *strides))


def test_reads_and_writes_reach_the_pages(arena: Arena) -> None:
    whole = tensor(arena, 0, [16, GRANULE], INT, 8)
    assert (whole.dtype, whole.shape, whole.device.type) == (torch.int8, (16, GRANULE), "cpu")
    assert whole.data_ptr() == arena.base
    assert torch.equal(whole[:2], torch.full((2, GRANULE), -1, dtype=torch.int8))
    floats = tensor(arena, GRANULE, [GRANULE // 4], FLOAT, 32)
    floats.copy_(torch.arange(GRANULE // 4, dtype=torch.float32))
    assert torch.equal(whole[1].view(torch.float32), floats)
    assert torch.equal(floats[-3:], torch.tensor([524285.0, 524286.0, 524287.0]))


def test_every_type_of_a_kv_cache(arena: Arena) -> None:
    for code, bits, dtype in [(BFLOAT, 16, torch.bfloat16), (FLOAT, 16, torch.float16), (1, 8, torch.uint8)]:
        assert tensor(arena, arena.offsets[1], [4, 8], code, bits).dtype == dtype


def test_strides_place_a_view(arena: Arena) -> None:
    whole = tensor(arena, 0, [GRANULE], INT, 8)
    view = tensor(arena, 2, [2, 3], INT, 8, [100, 10])
    view.copy_(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int8))
    assert [int(whole[index]) for index in (2, 12, 22, 102, 112, 122)] == [1, 2, 3, 4, 5, 6]
    assert view.stride() == (100, 10)


BLOCK = (16, 4, 64)
"""Tokens, heads and elements of a block's K or V: 8 KiB in bfloat16, 256 of them in a granule."""

ELEMENTS = 16 * 4 * 64
PAGES = 4
BLOCKS = 256 * PAGES
Views = list[tuple[int, list[int], list[int] | None]]


def apart(offsets: list[int]) -> Views:
    return [(offset, [BLOCKS, *BLOCK], None) for offset in offsets]


def k_then_v(offsets: list[int]) -> Views:
    distance = (offsets[1] - offsets[0]) // 2
    strides = [distance, ELEMENTS, 256, 64, 1]
    return [(offset, [2, BLOCKS, *BLOCK], strides) for offset in offsets[::2]]


def k_beside_v(offsets: list[int]) -> Views:
    return [(offset, [BLOCKS, 2, *BLOCK], None) for offset in offsets]


def block_major(offsets: list[int]) -> Views:
    strides = [4 * ELEMENTS, ELEMENTS, 256, 64, 1]
    return [(layer * 2 * ELEMENTS * 2, [BLOCKS, 2, *BLOCK], strides) for layer in range(2)]


def latent(offsets: list[int]) -> Views:
    return [(offset, [1024 * PAGES, 16, 576], None) for offset in offsets]


@pytest.mark.parametrize(
    ("layout", "granules"),
    [(apart, [1] * 4), (k_then_v, [1] * 4), (k_beside_v, [2] * 2), (block_major, [4]), (latent, [9] * 2)],
)
def test_the_blocks_of_a_page_are_its_memory_in_any_layout(
    driver: HostDriver, layout: Callable[[list[int]], Views], granules: list[int]
) -> None:
    arena = Arena(driver, [count * GRANULE for count in granules], PAGES)
    ask(arena, 1)
    arena.apply(1, [2], [])
    for offset, shape, strides in layout(arena.offsets):
        view = from_dlpack(arena.dlpack(offset, shape, BFLOAT, 16, strides))
        blocks = view.movedim(shape.index(max(shape)), 0)
        quarter = len(blocks) // PAGES
        # What is not of page 2 would fault.
        blocks[2 * quarter : 3 * quarter] = 1.0
    for offset, stride in zip(arena.offsets, arena.strides, strict=True):
        page = from_dlpack(arena.dlpack(offset + 2 * stride, [stride // 2], BFLOAT, 16))
        assert torch.equal(page, torch.ones_like(page))
    del view, blocks, page
    arena.close()


def test_several_groups_share_the_same_bytes(arena: Arena) -> None:
    attention = tensor(arena, 0, [256, *BLOCK], BFLOAT, 16)
    window = tensor(arena, 0, [128, 16, 1024], 1, 8)
    attention[129] = 2.0
    assert torch.equal(window[64].flatten()[8192:].view(torch.bfloat16), attention[129].flatten())


def test_an_arena_with_tensors_refuses_to_close(arena: Arena, driver: HostDriver) -> None:
    view = tensor(arena, 0, [16], INT, 8)
    unused = arena.dlpack(0, [16], INT, 8)
    with pytest.raises(ArenaInUseError, match="2 tensors over the arena are alive"):
        arena.close()
    view[0] = 5
    arena.apply(2, [], [1])
    done(arena, 2)
    del unused
    with pytest.raises(BufferError, match="1 tensors"):
        arena.close()
    assert int(view[0]) == 5


def test_a_tensor_keeps_the_memory_of_a_dropped_arena(driver: HostDriver) -> None:
    arena = two_tensors(driver)
    ask(arena, 1)
    arena.apply(1, [0], [])
    view = tensor(arena, 0, [GRANULE], INT, 8)
    del arena
    gc.collect()
    view.fill_(3)
    assert int(view.sum(dtype=torch.int64)) == 3 * GRANULE
    assert taken(driver) == 3 * GRANULE
    del view
    gc.collect()
    assert taken(driver) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, [48 * GRANULE + 1], INT, 8), "shape has 100663297"),
        ((GRANULE, [48 * GRANULE], INT, 8), "at offset 2097152 does not end within"),
        ((48 * GRANULE + 8, [0], INT, 8), "does not end within"),
        ((-1, [1], INT, 8), "offset is -1"),
        ((2, [1], FLOAT, 32), "offset 2 is not a multiple of the element's 4"),
        ((0, [-1], INT, 8), "shape has -1"),
        ((0, [1 << 20, 1 << 20], INT, 8), "does not end within"),
        ((0, [1 << 20, 1 << 20, 1 << 24], INT, 8), "more elements than the arena"),
        ((0, [2, 2], INT, 8, [1 << 62, 1 << 62]), "does not end within"),
        ((0, [2], INT, 8, [-1]), "stride -1 is negative"),
        ((0, [2], INT, 8, [1, 1]), "2 strides for a shape of 1 axes"),
        ((0, [2], INT, 4), "type_bits is 4"),
    ],
)
def test_what_does_not_lie_within_the_arena_is_refused(
    arena: Arena, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        arena.dlpack(*arguments)


def test_a_closed_arena_makes_no_tensor(driver: HostDriver) -> None:
    arena = two_tensors(driver)
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.dlpack(0, [1], INT, 8)
