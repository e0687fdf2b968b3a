"""Limits on a real engine process by a real daemon: what the operator, the kernel and the requests see."""

from contextlib import closing
from pathlib import Path

import pytest
from kvquota.agent.engines.reference.engine import Engine
from kvquota.agent.engines.reference.process import EngineProcess, memfd_bytes
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import until
from tests.support.reference import PAGE_BYTES, PAGE_TOKENS, prompt, prompts
from tests.support.scene import NAME, Scene, results

# With 12 more tokens each takes as many blocks as a page has.
FILL = [prompt(PAGE_TOKENS - 24, seed) for seed in range(12)]
STREAM = prompts(60, seed=5)
NEW_TOKENS = 40
LIVE = prompt(80, seed=6)
LIVE_TOKENS = 400
LATER = prompt(300, seed=7)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[list[int]]]:
    """The unmodified engine's answers."""
    with closing(Engine(model, blocks=4000)) as engine:
        return {
            "stream": [c.tokens for c in engine.generate(STREAM, NEW_TOKENS)],
            "live": [c.tokens for c in engine.generate([LIVE], LIVE_TOKENS)],
            "later": [c.tokens for c in engine.generate([LATER], NEW_TOKENS)],
        }


def fill(engine: EngineProcess) -> None:
    """Twelve pages of prefix cache, oldest first."""
    for tokens in FILL:
        engine.generate([tokens], 12)


def test_idle_shrink_keeps_the_part_of_the_cache_that_fits(scene: Scene) -> None:
    engine = scene.start()
    fill(engine)
    assert memfd_bytes(engine.pid) >= 12 * PAGE_BYTES
    instance = scene.limit(4, engine)
    assert instance.status == pb.STATUS_APPLIED
    assert instance.evictable_bytes == 4 * PAGE_BYTES
    # The first block of a prompt is often in the page of the one before.
    for tokens in reversed(FILL[-3:]):
        assert engine.generate([tokens[: PAGE_TOKENS - 40]], 1)[0].hit_tokens > PAGE_TOKENS - 80
    assert engine.generate(FILL[:1], 1)[0].hit_tokens == 0


def test_busy_shrink_fails_no_request(scene: Scene, expected: dict[str, list[list[int]]]) -> None:
    engine = scene.start()
    futures = [engine.submit(tokens, NEW_TOKENS) for tokens in STREAM]
    until("memory in use", lambda: scene.status().pinned_bytes > 2 * PAGE_BYTES)
    assert scene.limit(2, engine).status == pb.STATUS_APPLIED
    for future in futures:
        future.result(60)
        assert memfd_bytes(engine.pid) <= 2 * PAGE_BYTES
    assert results(futures) == expected["stream"]


def test_limit_0_and_restore_three_times(scene: Scene, expected: dict[str, list[list[int]]]) -> None:
    engine = scene.start()
    for _ in range(3):
        live = engine.submit(LIVE, LIVE_TOKENS)
        until("a running request", lambda: scene.status().pinned_bytes > 0)
        scene.daemon.set(NAME, 0)
        until("decided", lambda: scene.status().observed_revision == scene.status().revision)
        later = engine.submit(LATER, NEW_TOKENS)
        assert results([live]) == expected["live"]
        assert scene.limit(0, engine).status == pb.STATUS_APPLIED
        assert memfd_bytes(engine.pid) == 0
        until("a waiting request", lambda: scene.status().requests_blocked == 1)
        assert not later.done()
        scene.limit(None, engine)
        assert results([later]) == expected["later"]


def test_limit_0_while_idle_and_restore_three_times(scene: Scene) -> None:
    engine = scene.start()
    for _ in range(3):
        fill(engine)
        assert memfd_bytes(engine.pid) >= 12 * PAGE_BYTES
        scene.limit(0, engine)
        assert memfd_bytes(engine.pid) == 0
        scene.limit(None, engine)


@pytest.mark.parametrize("pages", [64, 1000, None])
def test_restore_regrows(scene: Scene, pages: int | None) -> None:
    engine = scene.start()
    fill(engine)
    scene.limit(2, engine)
    instance = scene.limit(pages, engine)
    assert instance.status == pb.STATUS_APPLIED
    assert instance.HasField("limit_bytes") == (pages is not None)
    fill(engine)
    assert memfd_bytes(engine.pid) >= 12 * PAGE_BYTES
    assert engine.generate(FILL[:1], 1)[0].hit_tokens > 0


def test_limit_below_one_page_takes_everything(scene: Scene) -> None:
    engine = scene.start()
    fill(engine)
    assert scene.limit(0.9, engine).status == pb.STATUS_APPLIED
    assert memfd_bytes(engine.pid) == 0


@pytest.mark.parametrize("pages", [0, 0.9])
def test_limit_below_the_floor_leaves_the_null_block(scene: Scene, pages: float) -> None:
    engine = scene.start("--null-block")
    fill(engine)
    instance = scene.limit(pages, engine)
    assert (instance.status, instance.reason) == (pb.STATUS_DEFERRED, pb.REASON_FLOOR)
    assert instance.limit_bytes == int(pages * PAGE_BYTES)
    assert instance.mapped_bytes == PAGE_BYTES
    assert instance.overage_bytes == PAGE_BYTES - instance.limit_bytes
    assert memfd_bytes(engine.pid) == PAGE_BYTES


def test_limit_of_an_engine_to_come_is_in_force_from_its_first_page(scene: Scene) -> None:
    scene.daemon.set(NAME, 3 * PAGE_BYTES, create=True)
    engine = scene.start()
    for tokens in FILL:
        engine.generate([tokens], 12)
        assert memfd_bytes(engine.pid) <= 3 * PAGE_BYTES
    instance = scene.status()
    assert (instance.status, instance.limit_bytes) == (pb.STATUS_APPLIED, 3 * PAGE_BYTES)
    assert instance.mapped_bytes == 3 * PAGE_BYTES


def test_warm_pages_go_with_the_limit(scene: Scene) -> None:
    engine = scene.start(reserve=8 * PAGE_BYTES)
    scene.until_pages(engine, 8, 8)
    scene.limit(3, engine)
    scene.until_pages(engine, 0, 3)
