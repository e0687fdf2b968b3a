"""Where KV blocks lie over an arena, checked against the views that vLLM makes of its buffer."""

from typing import Any

import pytest
from kvquota.agent.settings import SettingError

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]

BLOCK_TOKENS = 16
HEADS = 2
HEAD_DIM = 64
BLOCK_BYTES = BLOCK_TOKENS * HEADS * 2 * HEAD_DIM * 4


def spec() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.float32
    )


def config(order: str, blocks: int, groups: list[list[str]]) -> Any:
    """A KV cache as vLLM lays it out: one tensor a group, groups overlay each other."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layers = max(len(names) for names in groups)
    size = layers * BLOCK_BYTES * blocks
    outermost = KVCacheLayout[order].is_block_outermost
    tensors = [
        KVCacheTensor(
            size=size,
            layers=names,
            layer_stride=BLOCK_BYTES if outermost else BLOCK_BYTES * blocks,
            block_stride=BLOCK_BYTES * layers if outermost else BLOCK_BYTES,
        )
        for names in groups
    ]
    return KVCacheConfig(
        blocks, tensors, [KVCacheGroupSpec(names, spec()) for names in groups], kv_cache_layout=order
    )


def arena_offsets(strides: list[int], pages: int) -> list[int]:
    ends = [sum(strides[: t + 1]) * pages for t in range(len(strides))]
    return [0, *ends[:-1]]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("blocks", [1000, 4001])
@pytest.mark.parametrize(
    "groups", [[["a", "b", "c"]], [["a", "b"], ["c", "d"]]], ids=["one group", "overlay"]
)
def test_every_block_lies_wholly_in_the_pages_that_back_it(
    order: str, blocks: int, groups: list[list[str]]
) -> None:
    import torch
    from kvquota.agent.engines.vllm.layout import Layout
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import create_kv_cache_views

    stock = config(order, blocks, groups)
    layout = Layout.of(stock)
    geometry = layout.geometry()
    strides = geometry.strides(layout.block_bytes)
    offsets = arena_offsets(strides, geometry.pages)
    size = sum(strides) * geometry.pages
    placed = layout.place(stock, offsets, size)
    buffer = torch.empty(size, dtype=torch.int8, device="meta")

    for tensor in placed.kv_cache_tensors:
        views = create_kv_cache_views(buffer, spec(), blocks, KVCacheLayout[order], tensor)
        for view in views:
            begin = view.storage_offset() * view.element_size()
            step = view.stride(0) * view.element_size()
            for page, (first, end) in enumerate(geometry.ranges()):
                for block in {first, (first + end) // 2, end - 1}:
                    at = begin + block * step
                    runs = [
                        (offset + page * stride, offset + (page + 1) * stride)
                        for offset, stride in zip(offsets, strides, strict=True)
                    ]
                    assert any(low <= at and at + BLOCK_BYTES <= high for low, high in runs), (page, block)
    assert geometry.capacity_blocks >= blocks * 15 // 16


def test_layers_of_a_group_stay_apart() -> None:
    from kvquota.agent.engines.vllm.layout import Layout

    stock = config("LBHNC", 1000, [["a", "b"], ["c", "d"]])
    layout = Layout.of(stock)
    assert layout.block_bytes == (BLOCK_BYTES, BLOCK_BYTES)
    strides = layout.geometry().strides(layout.block_bytes)
    pages = layout.geometry().pages
    placed = layout.place(stock, arena_offsets(strides, pages), sum(strides) * pages)
    first, second = placed.kv_cache_tensors
    assert (
        (first.offset, first.layer_stride) == (second.offset, second.layer_stride) == (0, strides[0] * pages)
    )


def test_an_order_that_splits_blocks_is_refused_by_name() -> None:
    from kvquota.agent.engines.vllm.layout import Layout

    with pytest.raises(SettingError, match="VLLM_KV_CACHE_LAYOUT is LHBNC"):
        Layout.of(config("LHBNC", 1000, [["a", "b"]]))
