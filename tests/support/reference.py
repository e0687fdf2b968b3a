"""Models, prompts and settings for tests on the reference engine."""

import random
from pathlib import Path

import torch
from kvquota.agent.engines.reference.checkpoint import Shape, write_checkpoint
from kvquota.agent.settings import Settings

# The models are far too small for threads to pay.
torch.set_num_threads(1)

# Much KV for few tokens: a page is 2 MiB in each of 2 tensors, and holds 32 blocks of 16 tokens.
SHAPE = Shape(layers=1, heads=8, kv_heads=4, head_dim=256)
PAGE_BYTES = 2 * (2 << 20)
PAGE_BLOCKS = 32
BLOCK_TOKENS = 16
PAGE_TOKENS = PAGE_BLOCKS * BLOCK_TOKENS


def write_model(directory: Path) -> Path:
    """A checkpoint with small pages."""
    return write_checkpoint(directory, shape=SHAPE)


def prompt(length: int, seed: int) -> list[int]:
    """The same tokens for the same seed."""
    source = random.Random(seed)
    return [source.randrange(3, SHAPE.vocab) for _ in range(length)]


def prompts(count: int, seed: int, longest: int = 200) -> list[list[int]]:
    """Prompts of different lengths, most of which start like others."""
    source = random.Random(seed)
    starts = [[], prompt(40, seed + 1), prompt(100, seed + 2)]
    return [source.choice(starts) + prompt(source.randrange(1, longest), seed + 10 + n) for n in range(count)]


def alone(directory: Path, *, limit: int | None = None, reserve: int = 0) -> Settings:
    """Settings of an elastic engine with no daemon near. Fresh memory is filled with 0xff."""
    return Settings(
        instance="test",
        socket=directory / "agent.sock",
        default_limit=limit,
        reserve_bytes=reserve,
        host_fill=255,
    )
