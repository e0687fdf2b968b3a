"""The model alone: what it computes, and that its KV cache matters."""

from pathlib import Path

import pytest
import torch
from kvquota.agent.engines.reference.checkpoint import write_checkpoint
from kvquota.agent.engines.reference.memory import KV
from kvquota.agent.engines.reference.model import Chunk, Qwen3

from tests.support.reference import prompt

# What transformers 5.19 and vLLM 0.32 answer, greedily and in float32, to prompt(length, seed=length).
EXPECTED = {
    3: [860, 681, 482, 127, 825, 31, 860, 165, 605, 271, 838, 92, 228, 565, 920, 570],
    16: [605, 288, 482, 31, 197, 437, 355, 60, 945, 984, 838, 1009, 953, 784, 29, 95],
    17: [160, 759, 1020, 949, 218, 948, 279, 955, 697, 961, 687, 690, 902, 876, 697, 712],
    64: [110, 891, 643, 943, 413, 849, 582, 528, 331, 255, 243, 653, 449, 782, 827, 180],
    300: [236, 992, 328, 208, 152, 34, 634, 444, 255, 47, 380, 585, 1004, 50, 813, 494],
    1000: [222, 284, 260, 824, 532, 845, 766, 315, 475, 592, 817, 479, 913, 412, 754, 469],
}
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3:
    return Qwen3(write_checkpoint(tmp_path_factory.mktemp("model")))


def empty_kv(model: Qwen3, blocks: int) -> KV:
    """Not a number anywhere: whatever is read before it is written shows."""
    shape = (blocks, BLOCK_TOKENS, model.kv_heads, model.head_dim)
    return [(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in range(model.layers)]


def generate(model: Qwen3, kv: KV, tokens: list[int], count: int, chunk: int = 10_000) -> list[int]:
    """Greedy tokens of one sequence in the last blocks of `kv`, last block first."""
    blocks = list(reversed(range(len(kv[0][0]))))
    tokens, start = list(tokens), 0
    output: list[int] = []
    while len(output) < count:
        part = tokens[start : start + chunk]
        used = blocks[: -(-(start + len(part)) // BLOCK_TOKENS)]
        (token,) = model.forward([Chunk(part, start, used)], kv)
        start += len(part)
        if start == len(tokens):
            output.append(token)
            tokens.append(token)
    return output


@pytest.mark.parametrize("length", EXPECTED)
def test_equals_transformers_and_vllm(model: Qwen3, length: int) -> None:
    assert generate(model, empty_kv(model, 70), prompt(length, seed=length), 16) == EXPECTED[length]


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_prefill_in_chunks_equals_prefill_at_once(model: Qwen3, chunk: int) -> None:
    tokens = prompt(120, seed=1)
    whole = generate(model, empty_kv(model, 10), tokens, 16)
    assert generate(model, empty_kv(model, 10), tokens, 16, chunk) == whole


def test_sequences_of_a_batch_do_not_mix(model: Qwen3) -> None:
    first, second = prompt(40, seed=2), prompt(25, seed=3)
    kv = empty_kv(model, 8)
    together = model.forward([Chunk(first, 0, [7, 0, 3]), Chunk(second, 0, [5, 1])], kv)
    alone = [generate(model, empty_kv(model, 8), tokens, 1)[0] for tokens in (first, second)]
    assert together == alone


def test_one_other_token_early_changes_what_follows(model: Qwen3) -> None:
    tokens = prompt(200, seed=4)
    changed = [tokens[0] ^ 1, *tokens[1:]]
    kept = generate(model, empty_kv(model, 20), tokens, 16)
    assert generate(model, empty_kv(model, 20), changed, 16) != kept
    assert len(set(kept)) > 8


@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_one_corrupted_slot_changes_what_follows(model: Qwen3, half: int) -> None:
    tokens = prompt(100, seed=5)
    blocks = list(range(8))

    def answer(corrupt: bool) -> list[int]:
        kv = empty_kv(model, 8)
        (token,) = model.forward([Chunk(tokens, 0, blocks)], kv)
        if corrupt:
            kv[0][half][2, 5] *= -3
        output = [token]
        for position in range(100, 116):
            output += model.forward([Chunk(output[-1:], position, blocks)], kv)
        return output

    assert answer(corrupt=True) != answer(corrupt=False)


def test_bfloat16_runs(model: Qwen3, tmp_path: Path) -> None:
    half = Qwen3(write_checkpoint(tmp_path), "bfloat16")
    kv = [(keys.bfloat16(), values.bfloat16()) for keys, values in empty_kv(half, 8)]
    assert len(set(generate(half, kv, prompt(50, seed=6), 16))) > 8


def test_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="dtype 'float8'"):
        Qwen3(tmp_path, "float8")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"qwen3"', '"llama"'))
    with pytest.raises(ValueError, match="'llama'"):
        Qwen3(tmp_path)
