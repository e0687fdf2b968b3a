"""A vLLM whose engine core is in its user's process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import DaemonProcess, until
from tests.support.vllm import ENVIRONMENT
from tests.support.vllm_pages import BLOCK_BYTES, PAGE_BYTES, model, prompts

pytestmark = pytest.mark.vllm

NAME = "in-process"
PAGES = 12
ROOT = Path(__file__).parents[2]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path)
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def engine(tmp_path: Path, daemon: DaemonProcess) -> Iterator["subprocess.Popen[str]"]:
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **daemon.environment(NAME),
        "KVQUOTA_HOST_FILL": "255",
    }
    arguments = [str(model(tmp_path / "model")), str(PAGES * 16 * BLOCK_BYTES)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.vllm_in_process", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert "ready\n" in iter(process.stdout.readline, "")
            yield process
            process.communicate(timeout=30)
            assert process.returncode == 0
        finally:
            process.kill()


def generate(engine: "subprocess.Popen[str]", numbers: range) -> list[list[int]]:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(json.dumps(prompts(numbers)) + "\n")
    engine.stdin.flush()
    tokens: list[list[int]] = json.loads(engine.stdout.readline())
    return tokens


def call(engine: "subprocess.Popen[str]", name: str) -> None:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(json.dumps(name) + "\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "done\n"


def test_a_limit_waits_for_the_next_step_and_says_so(
    daemon: DaemonProcess, engine: "subprocess.Popen[str]"
) -> None:
    first = generate(engine, range(8))
    assert daemon.get(NAME).mapped_bytes > 6 * PAGE_BYTES

    response = daemon.set(NAME, 3 * PAGE_BYTES, wait=True, wait_timeout_ms=500)

    assert response.timed_out
    instance = response.instance
    assert (instance.status, instance.reason) == (pb.STATUS_DEFERRED, pb.REASON_ENGINE_NOT_STEPPING)
    assert instance.mapped_bytes > 6 * PAGE_BYTES

    def applied() -> bool:
        assert generate(engine, range(7, 8)) == first[7:]
        return daemon.get(NAME).status == pb.STATUS_APPLIED

    until("steps have applied it", applied)
    assert daemon.get(NAME).mapped_bytes <= 3 * PAGE_BYTES
    assert generate(engine, range(8)) == first


def test_a_sleeping_engine_gives_its_memory_back_at_its_next_step(
    daemon: DaemonProcess, engine: "subprocess.Popen[str]"
) -> None:
    first = generate(engine, range(8))
    call(engine, "sleep")

    def gone() -> bool:
        # The first step gives it back, and a later one hears that it went.
        call(engine, "step")
        return daemon.get(NAME).mapped_bytes == 0

    until("all memory is gone", gone)
    assert daemon.get(NAME).status == pb.STATUS_APPLIED
    call(engine, "wake_up")
    assert generate(engine, range(8)) == first
