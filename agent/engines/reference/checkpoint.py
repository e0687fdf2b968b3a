"""A tiny Qwen3 checkpoint in the Hugging Face format: every engine that kvquota serves can load it.

The weights are random but not arbitrary: with a plain initialisation such a model answers one token for ever.
With these its greedy output is diverse, and one changed token or one corrupted KV slot changes what follows.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INITIALIZER_RANGE = 0.15
QK_NORM = 1.6
SPECIAL = ("<unk>", "<bos>", "<eos>")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3. The defaults make a block of 16 tokens 64 KiB in float32, over all layers."""

    vocab: int = 1024
    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    positions: int = 8192


def write_checkpoint(directory: Path, seed: int = 0, shape: Shape | None = None) -> Path:
    """Write config, float32 weights and a word-level tokenizer to `directory`, made if missing."""
    shape = shape or Shape()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(shape, seed), directory / "model.safetensors", metadata={"format": "pt"})
    words = [*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), shape.vocab))]
    files = {
        "config.json": _config(shape),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False},
        "tokenizer.json": _tokenizer(words),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "model_max_length": shape.positions,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    return directory


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": INITIALIZER_RANGE,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns).normal_(0.0, INITIALIZER_RANGE, generator=generator)

    weights = {"model.embed_tokens.weight": random(shape.vocab, shape.hidden)}
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        weights |= {
            layer + "input_layernorm.weight": torch.ones(shape.hidden),
            layer + "self_attn.q_proj.weight": random(queries, shape.hidden),
            layer + "self_attn.k_proj.weight": random(keys, shape.hidden),
            layer + "self_attn.v_proj.weight": random(keys, shape.hidden),
            layer + "self_attn.o_proj.weight": random(shape.hidden, queries),
            layer + "self_attn.q_norm.weight": torch.full((shape.head_dim,), QK_NORM),
            layer + "self_attn.k_norm.weight": torch.full((shape.head_dim,), QK_NORM),
            layer + "post_attention_layernorm.weight": torch.ones(shape.hidden),
            layer + "mlp.gate_proj.weight": random(shape.intermediate, shape.hidden),
            layer + "mlp.up_proj.weight": random(shape.intermediate, shape.hidden),
            layer + "mlp.down_proj.weight": random(shape.hidden, shape.intermediate),
        }
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    weights["lm_head.weight"] = random(shape.vocab, shape.hidden)
    return weights


def _tokenizer(words: list[str]) -> dict[str, Any]:
    special = [
        {"id": n, "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for n, word in enumerate(SPECIAL)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: n for n, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }
