"""Two engines on a device that is too small for both: what one gives back, the other gets."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kvquota.agent.engines.reference.engine import Engine
from kvquota.agent.engines.reference.process import memfd_bytes
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import DaemonProcess
from tests.support.reference import PAGE_BYTES, PAGE_TOKENS, prompt, prompts
from tests.support.scene import Scene, results

CAPACITY = 24 * PAGE_BYTES
FILL = [prompt(PAGE_TOKENS - 24, seed) for seed in range(30)]
STREAM = prompts(40, seed=5)


@pytest.fixture
def small_scene(short_dir: Path, model: Path) -> Iterator[Scene]:
    daemon = DaemonProcess(short_dir, capacity=str(CAPACITY))
    daemon.start()
    scene = Scene(daemon, model)
    yield scene
    scene.close()
    daemon.kill()


def test_what_one_engine_gives_back_the_other_gets(small_scene: Scene, model: Path) -> None:
    with closing(Engine(model, blocks=4000)) as unmodified:
        expected = [c.tokens for c in unmodified.generate(STREAM, 40)]
    second = small_scene.start(name="second", reserve=2 * PAGE_BYTES)
    small_scene.until_pages(second, 2, 2)
    first = small_scene.start(name="first", reserve=2 * PAGE_BYTES)
    # Out of device memory, the first evicts its own cache.
    results([first.submit(tokens, 12) for tokens in FILL])
    assert memfd_bytes(first.pid) == CAPACITY - 2 * PAGE_BYTES
    assert small_scene.status("first").status == pb.STATUS_APPLIED
    # The second serves from the little that it has.
    assert results([second.submit(tokens, 40) for tokens in STREAM]) == expected
    assert memfd_bytes(second.pid) == 2 * PAGE_BYTES

    small_scene.limit(4, first, name="first")
    results([second.submit(tokens, 12) for tokens in FILL])
    assert memfd_bytes(second.pid) > 12 * PAGE_BYTES
    assert results([second.submit(tokens, 40) for tokens in STREAM]) == expected
    assert memfd_bytes(first.pid) + memfd_bytes(second.pid) <= CAPACITY
