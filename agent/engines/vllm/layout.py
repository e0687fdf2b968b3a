"""Where vLLM's KV blocks lie in its one buffer, and where they lie over an arena."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvquota.agent.geometry import Geometry
from kvquota.agent.settings import SettingError
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout

COMMAND = "kvquota_command"
"""The attribute of a SchedulerOutput that carries a page command to the workers."""

GRANULE = 2 << 20
"""What the drivers map at once. The leader must know it without a driver: it holds no context on a device."""

_SETTING = "--block-size"


@dataclass(frozen=True)
class Layout:
    """The tensors of a KV cache: tensor t begins at `starts[t]`, and its blocks are `block_bytes[t]` apart.

    In the layer-outermost orders each layer is a tensor, shared by the groups whose layers overlay each
    other; in the block-outermost ones all layers are one tensor.
    """

    starts: tuple[int, ...]
    block_bytes: tuple[int, ...]
    blocks: int
    block_outermost: bool

    @staticmethod
    def of(config: KVCacheConfig) -> "Layout":
        """Raises SettingError for a KV cache that cannot be elastic."""
        name = config.kv_cache_layout
        order = KVCacheLayout[name] if name is not None else None
        if order is None or not (order.is_block_compact or order.is_block_outermost):
            raise SettingError(
                f"VLLM_KV_CACHE_LAYOUT is {name}: expected an order in which a block of a layer is one "
                "run of bytes, such as LBHNC or BLHNC"
            )
        tensors = config.kv_cache_tensors
        if not tensors or any(tensor.host_resident for tensor in tensors):
            raise SettingError(f"the model has no KV cache that can be elastic: {tensors}")
        found: dict[int, int] = {}
        for tensor in tensors:
            for start in [0] if order.is_block_outermost else _layer_starts(tensor):
                if found.setdefault(start, tensor.block_stride) != tensor.block_stride:
                    raise SettingError(
                        f"{_SETTING}: blocks of {found[start]} and of {tensor.block_stride} bytes share "
                        "memory: expected one size"
                    )
        starts = sorted(found)
        ends = [start + found[start] * config.num_blocks for start in starts]
        if any(start < end for start, end in zip(starts[1:], ends[:-1], strict=True)):
            raise SettingError(f"{_SETTING}: layers share a part of their memory only: {tensors}")
        block_bytes = tuple(found[start] for start in starts)
        return Layout(tuple(starts), block_bytes, config.num_blocks, order.is_block_outermost)

    def geometry(self) -> Geometry:
        """Its pages. Raises SettingError where none fit."""
        return Geometry.choose(self.block_bytes, self.blocks, GRANULE, _SETTING)

    def place(self, config: KVCacheConfig, offsets: Sequence[int], size: int) -> KVCacheConfig:
        """`config` with tensor t at `offsets[t]` of a buffer of `size` bytes. Blocks keep their distances."""
        if self.block_outermost:
            tensors = [replace(tensor, size=size) for tensor in config.kv_cache_tensors]
            return replace(config, kv_cache_tensors=tensors)
        where = dict(zip(self.starts, offsets, strict=True))
        tensors = []
        for tensor in config.kv_cache_tensors:
            layers = [where[start] for start in _layer_starts(tensor)]
            strides = {after - before for before, after in pairwise(layers)} or {tensor.layer_stride}
            if len(strides) > 1:
                raise SettingError(f"{_SETTING}: the layers {tensor.layers} are not evenly spaced: {layers}")
            tensors.append(replace(tensor, size=size, offset=layers[0], layer_stride=strides.pop()))
        return replace(config, kv_cache_tensors=tensors)


def _layer_starts(tensor: KVCacheTensor) -> list[int]:
    return [tensor.offset + layer * tensor.layer_stride for layer in range(len(tensor.layers))]
