"""KV tensors: a pair (keys, values) a layer, each of shape (blocks, block_tokens, kv_heads, head_dim)."""

import torch
from kvquota.agent.engines.reference.model import Qwen3
from kvquota.native import Arena
from torch.utils.dlpack import from_dlpack

KV = list[tuple[torch.Tensor, torch.Tensor]]

# DLPack's numbers for (type code, bits).
_DLPACK = {torch.float32: (2, 32), torch.bfloat16: (4, 16)}


def block_bytes(model: Qwen3, block_tokens: int) -> list[int]:
    """Bytes of one block in each KV tensor."""
    return [block_tokens * model.kv_heads * model.head_dim * model.dtype.itemsize] * (2 * model.layers)


def plain_kv(model: Qwen3, blocks: int, block_tokens: int) -> KV:
    """Ordinary tensors, whole from the start."""
    shape = (blocks, block_tokens, model.kv_heads, model.head_dim)
    return [
        (torch.empty(shape, dtype=model.dtype), torch.empty(shape, dtype=model.dtype))
        for _ in range(model.layers)
    ]


def elastic_kv(model: Qwen3, blocks: int, block_tokens: int, arena: Arena) -> KV:
    """Tensors over all of the arena's addresses. Touching a page that is not mapped ends the process."""
    shape = (blocks, block_tokens, model.kv_heads, model.head_dim)
    code, bits = _DLPACK[model.dtype]
    tensors = [from_dlpack(arena.dlpack(offset, shape, code, bits)) for offset in arena.offsets]
    return list(zip(tensors[::2], tensors[1::2], strict=True))
