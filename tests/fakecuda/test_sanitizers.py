"""The stand-in under the compiler's sanitizers: its other tests, run once more on such a build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
def test_the_stand_in_is_clean() -> None:
    library = subprocess.run(
        [os.environ.get("CXX", "g++"), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    names = ["context", "control", "device", "events", "memory"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(str(HERE / f"test_{name}.py") for name in names)],
        env={
            **os.environ,
            "FAKECUDA_SANITIZERS": "address,undefined",
            "LD_PRELOAD": library,
            # Python itself leaks at its end.
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
