"""Credits, maps and unmaps of an arena, on real memory."""

from collections.abc import Iterator

import pytest
from kvquota.native import Arena

from tests.native.arenas import GRANULE, TIMEOUT, ask, done, two_tensors, wait_for
from tests.native.devices import Device

PAGE = 3 * GRANULE


@pytest.fixture
def arena(device: Device) -> Iterator[Arena]:
    arena = two_tensors(device.driver)
    yield arena
    arena.close()


def test_layout_is_one_range_of_tensor_after_tensor(arena: Arena) -> None:
    assert arena.base % GRANULE == 0
    assert arena.strides == [GRANULE, 2 * GRANULE]
    assert arena.offsets == [0, 16 * GRANULE]
    assert arena.size == 16 * PAGE
    assert (arena.pages, arena.page_bytes) == (16, PAGE)


def test_memory_is_taken_by_credits_and_given_back_by_unmaps(arena: Arena, device: Device) -> None:
    assert device.taken() == 0
    ask(arena, 3)
    assert device.taken() == 3 * PAGE
    arena.apply(1, [0, 7, 8], [])
    report = arena.report()
    assert (report.done, report.mapped, report.held_bytes) == (1, 3, 3 * PAGE)
    arena.apply(2, [], [7, 8])
    report = done(arena, 2)
    assert (report.unmapped, report.held_bytes, device.taken()) == (2, PAGE, PAGE)
    assert report.faults == []


def test_a_page_can_come_back_after_it_was_unmapped(arena: Arena) -> None:
    ask(arena, 2)
    arena.apply(1, [5], [])
    arena.apply(2, [], [5])
    done(arena, 2)
    arena.apply(3, [5], [])
    assert (arena.report().mapped, arena.report().unmapped) == (2, 1)


def test_drop_releases_credits(arena: Arena, device: Device) -> None:
    ask(arena, 4)
    arena.ask(4, 3)
    report = wait_for(arena, lambda report: report.dropped == 3)
    assert (report.created, report.held_bytes, device.taken()) == (4, PAGE, PAGE)


def test_drop_before_creation_counts_as_created_and_dropped(arena: Arena, device: Device) -> None:
    arena.ask(1000, 1000)
    report = wait_for(arena, lambda report: report.dropped == 1000)
    assert (report.created, report.refused, report.held_bytes, device.taken()) == (1000, 0, 0, 0)


def test_an_old_ask_changes_nothing(arena: Arena) -> None:
    arena.ask(4, 2)
    arena.ask(3, 1)
    report = wait_for(arena, lambda report: report.created == 4 and report.dropped == 2)
    assert report.held_bytes == 2 * PAGE


def test_wait_credits_ends_at_its_time_out_and_when_nothing_comes(arena: Arena) -> None:
    assert arena.wait_credits(5, TIMEOUT) == 0
    arena.ask(2, 0)
    assert arena.wait_credits(5, TIMEOUT) == 2
    assert arena.wait_credits(5, 0) == 2


@pytest.mark.parametrize(
    ("seq", "maps", "unmaps", "message"),
    [
        (1, [3], [], "seq 1 after 1"),
        (2, [1], [], "page 1 can't be mapped"),
        (2, [3, 3], [], "page 3 is named twice"),
        (2, [16], [], "page 16 of an arena of 16 pages"),
        (2, [], [3], "page 3 can't be unmapped"),
        (2, [3, 4, 5], [], "3 pages takes as many credits, and 2 are held"),
        (2, [3], [3], "page 3 can't be unmapped"),
        (2, [-1], [], "page is -1"),
    ],
)
def test_an_impossible_command_is_refused_whole(
    arena: Arena, seq: int, maps: list[int], unmaps: list[int], message: str
) -> None:
    ask(arena, 3)
    arena.apply(1, [1], [])
    with pytest.raises(ValueError, match=message):
        arena.apply(seq, maps, unmaps)
    assert (arena.report().mapped, arena.report().done) == (1, 1)
    arena.apply(2, [3], [1])
    assert done(arena, 2).mapped == 2


def test_unmapping_twice_is_refused(arena: Arena) -> None:
    ask(arena, 1)
    arena.apply(1, [1], [])
    arena.apply(2, [], [1])
    with pytest.raises(ValueError, match="page 1 can't be unmapped"):
        arena.apply(3, [], [1])


def test_close_gives_everything_back(device: Device) -> None:
    arena = two_tensors(device.driver)
    ask(arena, 4)
    arena.apply(1, [0, 1, 2], [])
    arena.apply(2, [], [1])
    arena.close()
    arena.close()
    assert device.taken() == 0
    with pytest.raises(ValueError, match="closed"):
        arena.report()


@pytest.mark.parametrize(
    ("strides", "pages", "message"),
    [
        ([], 1, "strides is empty"),
        ([GRANULE], 0, "pages is 0"),
        ([GRANULE + 1], 1, "stride 2097153"),
        ([0], 1, "stride 0"),
    ],
)
def test_an_impossible_geometry_is_refused(
    device: Device, strides: list[int], pages: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Arena(device.driver, strides, pages)
