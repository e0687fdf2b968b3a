"""The vLLM that the tests run: a tiny model whose KV pages are small in tokens, and prompts to fill them."""

from collections.abc import Sequence
from pathlib import Path

from kvquota.agent.engines.reference.checkpoint import Shape, write_checkpoint

from tests.support.vllm import Engine

BLOCK_TOKENS = 32
BLOCK_BYTES = 512 << 10
"""Over the 4 layers: 128 KiB in each, in float32."""
PAGE_BYTES = 8 << 20
PAGE_TOKENS = BLOCK_TOKENS * PAGE_BYTES // BLOCK_BYTES
SHAPE = Shape(kv_heads=4, head_dim=128)
OUTPUT = 4
PROMPT_TOKENS = 14 * BLOCK_TOKENS - (OUTPUT - 1)
"""With OUTPUT tokens it fills 14 of a page's 16 blocks, all of them to the end: all are cached afterwards."""
HIT_TOKENS = 13 * BLOCK_TOKENS
"""What such a prompt takes from the cache the next time: never its last token."""


def model(directory: Path) -> Path:
    """Write the model's checkpoint."""
    return write_checkpoint(directory, shape=SHAPE)


def start(directory: Path, environment: dict[str, str], blocks: int, **options: object) -> Engine:
    """An engine with that many blocks. KVQUOTA in the environment makes it elastic."""
    merged = {"block_size": BLOCK_TOKENS, "kv_cache_memory_bytes": blocks * BLOCK_BYTES, **options}
    return Engine(directory, environment, **merged)


def prompt(number: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """A prompt that shares no prefix with that of another number."""
    return [3 + (number * 37 + n * n + 7 * n) % 1000 for n in range(tokens)]


def prompts(numbers: Sequence[int], tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """`prompt` of each number."""
    return [prompt(number, tokens) for number in numbers]
