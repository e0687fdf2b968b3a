"""Tensors over an arena, as torch sees them."""

import gc
from collections.abc import Iterator
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
