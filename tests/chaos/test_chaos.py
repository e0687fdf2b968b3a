"""Everything at once: limits, kills, stops and cut connections under load. See `make chaos`."""

import secrets
from pathlib import Path

import pytest

from tests.chaos.run import run


@pytest.mark.parametrize(
    "seconds", [20, pytest.param(180, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_nothing_breaks(seconds: float, short_dir: Path) -> None:
    faults = run(short_dir, secrets.randbelow(1 << 32), seconds)
    assert faults == []


@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.long)])
def test_nothing_breaks_in_vllm(seconds: float, asynchronous: bool, short_dir: Path) -> None:
    faults = run(short_dir, secrets.randbelow(1 << 32), seconds, "vllm", asynchronous=asynchronous)
    assert faults == []
