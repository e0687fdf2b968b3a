import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvquota.agent.geometry import Geometry
from kvquota.agent.settings import SettingError

GRANULE = 2 << 20
SETTING = "--block-size"


def test_blocks_that_divide_the_granule_waste_nothing() -> None:
    geometry = Geometry.choose([65536] * 4, 128, GRANULE, SETTING)
    assert geometry.span == GRANULE
    assert geometry.ranges() == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert geometry.strides([65536] * 4) == [GRANULE] * 4


def test_a_last_page_that_is_not_full_is_padded() -> None:
    geometry = Geometry.choose([65536], 1000, GRANULE, SETTING)
    assert geometry.pages == 32
    assert geometry.ranges()[-1] == (992, 1000)


def test_tensors_of_two_sizes_share_pages_by_their_common_divisor() -> None:
    geometry = Geometry.choose([65536, 131072], 128, GRANULE, SETTING)
    assert geometry.strides([65536, 131072]) == [GRANULE, 2 * GRANULE]
    assert geometry.ranges()[0] == (0, 32)


def test_a_rank_with_bigger_blocks_has_the_same_blocks_in_a_page() -> None:
    geometry = Geometry.choose([65536, 131072], 128, GRANULE, SETTING)
    assert geometry.strides([131072]) == [2 * GRANULE]
    with pytest.raises(SettingError, match="65537"):
        geometry.strides([65537])


def test_more_granules_where_one_wastes_too_much() -> None:
    # 3/4 of a granule: one granule holds one block and wastes a third, three hold four.
    geometry = Geometry.choose([GRANULE * 3 // 4], 40, GRANULE, SETTING)
    assert geometry.span == 3 * GRANULE
    assert geometry.ranges()[:2] == [(0, 4), (4, 8)]


def test_the_common_multiple_where_eight_granules_waste_too_much() -> None:
    geometry = Geometry.choose([9 * GRANULE], 8, GRANULE, SETTING)
    assert geometry.span == 9 * GRANULE
    assert geometry.ranges() == [(n, n + 1) for n in range(8)]


@pytest.mark.parametrize(
    ("sizes", "blocks"), [([GRANULE * 16 + 1], 100), ([65536], 32), ([], 10), ([0], 10), ([65536], 0)]
)
def test_a_size_that_cannot_be_elastic_names_the_setting(sizes: list[int], blocks: int) -> None:
    with pytest.raises(SettingError, match=SETTING):
        Geometry.choose(sizes, blocks, GRANULE, SETTING)


@given(
    units=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    unit=st.integers(1000, 3 * GRANULE),
    blocks=st.integers(1, 3000),
)
def test_no_block_is_in_two_pages_and_every_block_lies_inside_its_page(
    units: list[int], unit: int, blocks: int
) -> None:
    sizes = [n * unit for n in units]
    try:
        geometry = Geometry.choose(sizes, blocks, GRANULE, SETTING)
    except SettingError:
        return
    assert all(stride % GRANULE == 0 for stride in geometry.strides(sizes))
    before = 0
    for page, (first, end) in enumerate(geometry.ranges()):
        assert before <= first <= end <= blocks
        before = end
        for size, stride in zip(sizes, geometry.strides(sizes), strict=True):
            assert first == end or first * size >= page * stride
            assert end * size <= (page + 1) * stride
    full = math.ceil(blocks * math.gcd(*sizes) / geometry.span)
    assert geometry.pages == full
    whole_pages = geometry.ranges()[:-1]
    waste = 1 - sum(end - first for first, end in whole_pages) / max(1, whole_pages[-1][1])
    assert waste <= 1 / 16 or geometry.span % math.gcd(*sizes) == 0
