"""Growth on a real vLLM: while no limit is reached, nothing leaves the prefix cache that vLLM would keep."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.vllm import Engine, Reply
from tests.support.vllm_pages import HIT_TOKENS, OUTPUT, PAGE_BYTES, model, prompts, start

pytestmark = pytest.mark.vllm

PAGES = 32
BLOCKS = PAGES * 16
# Each takes 14 blocks: all of them fit.
BURSTS = (range(16), range(16, 32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


def replies(engine: Engine, bursts: Sequence[Sequence[int]]) -> list[list[Reply]]:
    return [engine.generate(prompts(burst), OUTPUT) for burst in bursts]


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> list[list[Reply]]:
    """What unmodified vLLM answers to the bursts, then to the same again."""
    engine = start(checkpoint, {}, BLOCKS)
    try:
        return replies(engine, BURSTS * 2)
    finally:
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("reserve_pages", [0, 1])
def test_bursts_that_fit_hit_the_cache_as_with_unmodified_vllm(
    checkpoint: Path, tmp_path: Path, stock: list[list[Reply]], reserve_pages: int, asynchronous: bool
) -> None:
    assert [reply.cached for reply in stock[2] + stock[3]] == [HIT_TOKENS] * 32
    environment = {
        "KVQUOTA": "1",
        "KVQUOTA_AGENT_SOCKET": str(tmp_path / "nobody"),
        "KVQUOTA_RESERVE_BYTES": str(reserve_pages * PAGE_BYTES),
        "KVQUOTA_HOST_FILL": "255",
    }
    engine = start(checkpoint, environment, BLOCKS, async_scheduling=asynchronous)
    try:
        answers = replies(engine, BURSTS * 2)
        assert [[reply.cached for reply in burst] for burst in answers] == [
            [reply.cached for reply in burst] for burst in stock
        ]
        assert answers == stock
    finally:
        engine.close()
