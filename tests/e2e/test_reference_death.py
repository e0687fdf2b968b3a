"""What is left of an engine that was killed, or asked to go: nothing."""

import os
import signal
from pathlib import Path

import pytest
from kvquota.agent.engines.reference.process import EngineProcess, memfd_bytes

from tests.support.daemon import until
from tests.support.reference import PAGE_BYTES, PAGE_TOKENS, prompt
from tests.support.scene import Scene

FILL = [prompt(PAGE_TOKENS - 24, seed) for seed in range(8)]
FORKING = (str(Path(__file__).with_name("forking_engine.py")),)


def fill(engine: EngineProcess) -> None:
    for tokens in FILL:
        engine.generate([tokens], 12)


def shared_bytes(pid: int) -> int:
    """Shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Shmem:"))


def test_killed_engine_with_a_forked_child_leaves_nothing(
    scene: Scene, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = short_dir / "child"
    monkeypatch.setenv("FORKED_PID_FILE", str(pid_file))
    engine = scene.start(program=FORKING)
    fill(engine)
    engine.process.send_signal(signal.SIGUSR1)
    until("a forked child", lambda: pid_file.exists() and pid_file.read_text())
    child = int(pid_file.read_text())
    try:
        fill(engine)
        engine.kill()
        until("absent", lambda: not scene.status().connected)
        assert memfd_bytes(child) == 0
        assert shared_bytes(child) < PAGE_BYTES
        again = scene.start()
        fill(again)
        assert scene.status().pid == again.pid
    finally:
        os.kill(child, signal.SIGKILL)


def test_memory_of_a_killed_engine_is_there_for_the_next(scene: Scene) -> None:
    # The device has 256 pages: so many engines of 60 fit only if those killed are settled.
    for number in range(6):
        engine = scene.start(name=f"engine-{number}", reserve=60 * PAGE_BYTES)
        scene.until_pages(engine, 60, 60)
        engine.kill()


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "loaded"])
def test_signalled_engine_ends_and_is_shown_as_absent(
    scene: Scene, signum: int, status: int, loaded: bool
) -> None:
    files = sorted(scene.daemon.root.rglob("*"))
    engine = scene.start()
    fill(engine)
    futures = [engine.submit(tokens, 300) for tokens in FILL] if loaded else []
    engine.process.send_signal(signum)
    assert engine.process.wait(20) == status
    until("absent", lambda: not scene.status().connected)
    for future in futures:
        with pytest.raises(RuntimeError):
            future.result(20)
    assert scene.status().mapped_bytes == 0
    assert sorted(scene.daemon.root.rglob("*")) == files
