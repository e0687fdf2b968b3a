"""Qwen3 in plain torch, with its KV cache in blocks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that a forward pass computes: `start` is the position of the first of them."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class Qwen3:
    """The weights of a checkpoint, and the forward pass over them."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        if config["model_type"] != "qwen3":
            raise ValueError(f"model_type {config['model_type']!r} in {directory}: expected 'qwen3'")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[dtype]
        self.weights = {k: v.to(self.dtype) for k, v in load_file(directory / "model.safetensors").items()}
        self.vocab: int = config["vocab_size"]
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.positions: int = config["max_position_embeddings"]
        self.epsilon: float = config["rms_norm_eps"]
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        angles = torch.arange(self.positions).float()[:, None] / float(config["rope_theta"]) ** exponents
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        """Compute the chunks, write their keys and values to `kv`, return the likeliest next tokens.

        `kv` has two tensors a layer, of shape (blocks, block_tokens, kv_heads, head_dim). No slot is read but
        those of the blocks that the chunks name, up to their last token.
        """
        block_tokens = kv[0][0].shape[1]
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        positions = torch.cat([torch.arange(c.start, c.start + len(c.tokens)) for c in chunks])
        contexts = []
        for chunk in chunks:
            length = chunk.start + len(chunk.tokens)
            starts = torch.tensor(chunk.blocks)[:, None] * block_tokens
            contexts.append((starts + torch.arange(block_tokens)).flatten()[:length])
        slots = torch.cat([slots[c.start :] for slots, c in zip(contexts, chunks, strict=True)])
        lengths = [len(chunk.tokens) for chunk in chunks]

        x = embedding(tokens, self.weights["model.embed_tokens.weight"])
        for number, (keys, values) in enumerate(kv):
            layer = f"model.layers.{number}."
            normed = self._norm(x, layer + "input_layernorm")
            query = self._heads(normed, layer + "self_attn.q_proj", self.heads)
            key = self._heads(normed, layer + "self_attn.k_proj", self.kv_heads)
            value = self._heads(normed, layer + "self_attn.v_proj", self.kv_heads)
            query = self._rotate(self._norm(query, layer + "self_attn.q_norm"), positions)
            key = self._rotate(self._norm(key, layer + "self_attn.k_norm"), positions)
            flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
            flat_keys[slots] = key
            flat_values[slots] = value
            attended = torch.cat(
                [
                    _attend(part, flat_keys[context], flat_values[context])
                    for part, context in zip(torch.split(query, lengths), contexts, strict=True)
                ]
            )
            x = x + linear(attended, self.weights[layer + "self_attn.o_proj.weight"])
            normed = self._norm(x, layer + "post_attention_layernorm")
            gate = silu(linear(normed, self.weights[layer + "mlp.gate_proj.weight"]))
            up = linear(normed, self.weights[layer + "mlp.up_proj.weight"])
            x = x + linear(gate * up, self.weights[layer + "mlp.down_proj.weight"])
        last = torch.tensor(lengths).cumsum(0) - 1
        logits = linear(self._norm(x[last], "model.norm"), self.weights["lm_head.weight"])
        return [int(token) for token in logits.argmax(-1)]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return wide.to(self.dtype) * self.weights[name + ".weight"]

    def _heads(self, x: torch.Tensor, name: str, heads: int) -> torch.Tensor:
        return linear(x, self.weights[name + ".weight"]).view(-1, heads, self.head_dim)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    rows, context = query.shape[0], keys.shape[0]
    mask = torch.ones(rows, context, dtype=torch.bool).tril(context - rows) if rows > 1 else None
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)
