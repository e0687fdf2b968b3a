"""The native code under the compiler's sanitizers, as programs without Python."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/fakecuda"
ARENA = ["arena", "arena_worker", "driver", "fork", "page_mapper"]
MEMORY = [*ARENA, "device_record", "dlpack", "fault_driver", "host_driver", "segment"]
CUDA = [*ARENA, "cuda_driver", *sorted(str(source) for source in STAND_IN.glob("*.cpp"))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("test", "names", "sanitizers"),
    [
        ("memory_test", MEMORY, "address,undefined"),
        ("memory_test", MEMORY, "thread"),
        ("cuda_test", CUDA, "address,undefined"),
        ("cuda_test", CUDA, "thread"),
        ("queue_test", ["page_queue"], "address,undefined"),
    ],
)
def test_native_code_is_clean(test: str, names: list[str], sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / test
    sources = [name if "/" in name else str(ROOT / f"native/src/{name}.cpp") for name in names]
    build = [
        os.environ.get("CXX", "g++"),
        "-std=c++17",
        "-O1",
        "-g",
        f"-fsanitize={sanitizers}",
        "-fno-sanitize-recover=all",
        f"-I{ROOT / 'native/include'}",
        *sources,
        str(ROOT / f"tests/native/{test}.cpp"),
        # The stand-in finds its functions by name.
        "-rdynamic",
        "-pthread",
        "-ldl",
        "-o",
        str(program),
    ]
    built = subprocess.run(build, capture_output=True, text=True, timeout=500, check=False)
    assert built.returncode == 0, built.stderr
    # Without address randomization: the thread sanitizer refuses some layouts.
    ran = subprocess.run(
        ["setarch", "-R", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    assert (ran.returncode, ran.stdout) == (0, "passed\n"), ran.stderr
