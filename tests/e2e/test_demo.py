"""`make demo`: it holds, and whatever happens to it, it leaves nothing."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.daemon import TIMEOUT, until

ROOT = Path(__file__).parents[2]
DEMO = (sys.executable, "-m", "deploy.demo")


def processes_of(folder: Path) -> list[str]:
    """Processes that have the folder in their environment: all that the demo started, and itself."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_demo_holds_and_leaves_nothing(short_dir: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(short_dir)}
    done = subprocess.run(
        DEMO, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All of it held" in done.stdout
    assert processes_of(short_dir) == []
    assert list(short_dir.iterdir()) == []


def test_demo_that_is_terminated_fails_and_leaves_nothing(short_dir: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(short_dir), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        DEMO, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        assert any("engine" in line for line in demo.stdout)
        until("daemon and engine", lambda: len(processes_of(short_dir)) >= 3)
        demo.send_signal(signal.SIGTERM)
        _, complaint = demo.communicate(timeout=TIMEOUT)
    assert demo.returncode == 1
    assert "FAILED: terminated" in complaint
    assert processes_of(short_dir) == []
    assert list(short_dir.iterdir()) == []
