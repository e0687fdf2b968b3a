"""Daemons that come and go under a real engine process."""

from kvquota.agent.engines.reference.process import EngineProcess, memfd_bytes
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import until
from tests.support.reference import PAGE_BYTES, PAGE_TOKENS, prompt, prompts
from tests.support.scene import NAME, Scene, results

FILL = [prompt(PAGE_TOKENS - 24, seed) for seed in range(8)]
STREAM = prompts(60, seed=5)


def fill(engine: EngineProcess) -> None:
    for tokens in FILL:
        engine.generate([tokens], 12)


def test_engine_without_a_daemon_comes_under_its_spec_when_one_appears(scene: Scene) -> None:
    scene.daemon.set(NAME, 3 * PAGE_BYTES, create=True)
    assert scene.daemon.stop() == 0
    engine = scene.start()
    fill(engine)
    assert memfd_bytes(engine.pid) > 3 * PAGE_BYTES
    scene.daemon.start()
    scene.until_joined()
    until("applied", lambda: scene.status().status == pb.STATUS_APPLIED)
    assert memfd_bytes(engine.pid) <= 3 * PAGE_BYTES


def test_daemon_killed_under_load_is_not_noticed_by_requests(scene: Scene) -> None:
    engine = scene.start()
    expected = results([engine.submit(tokens, 40) for tokens in STREAM])
    before = scene.limit(4, engine)
    futures = [engine.submit(tokens, 40) for tokens in STREAM]
    scene.daemon.kill()
    scene.daemon.start()
    scene.until_joined()
    after = scene.status()
    assert (after.revision, after.limit_bytes) == (before.revision, before.limit_bytes)
    assert results(futures) == expected
    assert memfd_bytes(engine.pid) <= 4 * PAGE_BYTES


def test_daemon_killed_while_idle_and_a_limit_after_it(scene: Scene) -> None:
    engine = scene.start()
    fill(engine)
    scene.daemon.kill()
    scene.daemon.start()
    scene.until_joined()
    assert scene.limit(2, engine).status == pb.STATUS_APPLIED
