"""The engine in this process: whatever happens to its memory, it answers as the unmodified engine does."""

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kvquota.agent.engines.reference import elastic
from kvquota.agent.engines.reference.engine import Completion, Engine
from kvquota.agent.settings import SettingError
from kvquota.native import FaultDriver, HostDriver

from tests.support.reference import (
    BLOCK_TOKENS,
    PAGE_BLOCKS,
    PAGE_BYTES,
    PAGE_TOKENS,
    alone,
    prompt,
    prompts,
    write_model,
)

MANY = prompts(40, seed=1)
NEW_TOKENS = 40
ROOMY = 64 * PAGE_BLOCKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Of the unmodified engine, with room for everything."""
    with closing(Engine(model, blocks=ROOMY)) as engine:
        return tokens(engine.generate(MANY, NEW_TOKENS))


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(**options: object) -> Engine:
            return stack.enter_context(closing(Engine(model, **options)))  # type: ignore[arg-type]

        yield start


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def preemptions(completions: list[Completion]) -> int:
    return sum(completion.preemptions for completion in completions)


def test_preempted_requests_go_on_with_the_same_tokens(
    start: Callable[..., Engine], expected: list[list[int]]
) -> None:
    completions = start(blocks=40).generate(MANY, NEW_TOKENS)
    assert tokens(completions) == expected
    assert preemptions(completions) > 0


def test_prefixes_are_found_again(start: Callable[..., Engine], expected: list[list[int]]) -> None:
    engine = start(blocks=ROOMY)
    engine.generate(MANY, NEW_TOKENS)
    again = engine.generate(MANY, NEW_TOKENS)
    assert tokens(again) == expected
    for asked, completion in zip(MANY, again, strict=True):
        assert completion.hit_tokens == (len(asked) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("null_block", [False, True])
@pytest.mark.parametrize("reserve", [0, 4 * PAGE_BYTES])
def test_elastic_equals_unmodified(
    start: Callable[..., Engine], expected: list[list[int]], tmp_path: Path, null_block: bool, reserve: int
) -> None:
    engine = start(blocks=ROOMY, null_block=null_block, settings=alone(tmp_path, reserve=reserve))
    assert tokens(engine.generate(MANY, NEW_TOKENS)) == expected
    again = engine.generate(MANY, NEW_TOKENS)
    assert tokens(again) == expected
    if reserve:  # else the engine evicts, now and then, where no credit is there yet
        for asked, completion in zip(MANY, again, strict=True):
            assert completion.hit_tokens == (len(asked) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("pages", [1, 2, 3, 5])
def test_elastic_under_a_tiny_limit_equals_unmodified(
    start: Callable[..., Engine], expected: list[list[int]], tmp_path: Path, pages: int
) -> None:
    engine = start(blocks=ROOMY, settings=alone(tmp_path, limit=pages * PAGE_BYTES))
    completions = engine.generate(MANY, NEW_TOKENS)
    assert tokens(completions) == expected


def test_admission_that_wants_more_than_an_empty_page_gets_it(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start(blocks=ROOMY, settings=alone(tmp_path))
    small, big = [3, 4, 5], prompt(PAGE_TOKENS + 100, seed=3)
    assert [len(c.tokens) for c in engine.generate([small, big], 2, timeout=20)] == [2, 2]


def test_blocks_that_straddle_pages_are_never_handed_out(
    start: Callable[..., Engine], expected: list[list[int]], tmp_path: Path
) -> None:
    # 15 tokens a block: 34 blocks and a part of one in each 2 MiB.
    engine = start(blocks=400, block_tokens=15, settings=alone(tmp_path, limit=4 * PAGE_BYTES))
    assert tokens(engine.generate(MANY, NEW_TOKENS)) == expected


def test_block_size_that_fits_no_page_is_refused(start: Callable[..., Engine], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--block-tokens"):
        start(blocks=10, block_tokens=700, settings=alone(tmp_path))


def test_requests_that_can_never_be_served_are_refused(start: Callable[..., Engine]) -> None:
    engine = start(blocks=10)
    for bad, count in ([], 5), ([3], 0), ([3] * 9000, 5), ([5000], 1), ([3] * 170, 5):
        with pytest.raises(ValueError, match="token"):
            engine.submit(bad, count)
    assert len(engine.generate([[3, 4, 5]], 4)[0].tokens) == 4


def test_starved_engine_sleeps(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(blocks=ROOMY, settings=alone(tmp_path, limit=0))
    rests: queue.SimpleQueue[int] = queue.SimpleQueue()
    sleep = engine._condition.wait

    def wait() -> bool:
        rests.put(engine._scheduler.refused)
        return sleep()

    monkeypatch.setattr(engine._condition, "wait", lambda _timeout: wait())
    engine.submit([3, 4, 5], 2)
    # Once it has refused the request there is nothing to do, and no time-out wakes it.
    while rests.get(timeout=20) == 0:
        pass


def test_close_ends_what_is_not_finished(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start(blocks=ROOMY, settings=alone(tmp_path, limit=0))
    starved = engine.submit(prompt(PAGE_TOKENS, seed=1), 5)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        starved.result(10)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([3], 1)


def test_pages_that_cannot_be_mapped_are_never_used(
    start: Callable[..., Engine],
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FaultDriver(HostDriver(fill=255))
    monkeypatch.setattr(elastic, "HostDriver", lambda **_: driver)
    engine = start(blocks=ROOMY, settings=alone(tmp_path))
    driver.fail("mem_map", nth=3, times=4)
    completions = engine.generate(MANY, NEW_TOKENS)
    assert tokens(completions) == expected
    assert preemptions(completions) > 0
    assert driver.calls("mem_map") > 7
