"""What only a GPU can show: `python -m tests.gpu.check` prints a table, and exits 1 where something failed.

Conformance of the driver table and of arenas, what each call costs, how fast memory is reclaimed, and kernels
over pages that come and go. Without a GPU it says so and exits 2; `--library` names a stand-in to try it on.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvquota.agent.cuda import driver as cuda
from kvquota.agent.cuda import open_driver

from tests.gpu import kernel, prices

ROOT = Path(__file__).parents[2]
CONFORMANCE = ["test_driver_table", "test_arena", "test_arena_faults"]
OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"


class Row(NamedTuple):
    """A line of the table."""

    figure: str
    value: str
    verdict: str = ""


def run(command: list[str], library: Path | None, timeout: float) -> tuple[int, str]:
    """Exit code, and the last line of what it said."""
    env = {**os.environ, "KVQUOTA_TEST_CUDA": "gpu"}
    if library is not None:
        env["LD_LIBRARY_PATH"] = str(library.parent)
    try:
        result = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"not over in {timeout:.0f} s"
    said = (result.stdout + result.stderr).strip().splitlines()
    if result.returncode not in (0, kernel.NO_TORCH):
        print(result.stdout, result.stderr, file=sys.stderr)
    return result.returncode, said[-1] if said else ""


def conformance(library: Path | None) -> Row:
    files = [f"tests/native/{name}.py" for name in CONFORMANCE]
    options = ["-q", "-k", "cuda", "-p", "no:cacheprovider", "-r", "N"]
    code, said = run([sys.executable, "-m", "pytest", *options, *files], library, 120)
    return Row("conformance", said.strip("= "), OK if code == 0 else FAILED)


def kernels(library: Path | None) -> Iterator[Row]:
    """Kernels over pages that come and go, plain and under compute-sanitizer."""
    command = [sys.executable, "-m", "tests.gpu.kernel"]
    verdicts = {0: OK, kernel.NO_TORCH: NOT_RUN}
    code, said = run([*command, "--seconds", "10"], library, 60)
    yield Row("kernels over pages that come and go", said, verdicts.get(code, FAILED))
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or code == kernel.NO_TORCH:
        yield Row("the same under compute-sanitizer", "" if sanitizer else "there is none here", NOT_RUN)
        return
    code, said = run([sanitizer, "--error-exitcode", "9", *command, "--seconds", "2"], library, 90)
    yield Row("the same under compute-sanitizer", said, verdicts.get(code, FAILED))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument(
        "--library", type=Path, help="a libcuda.so.1 to use instead of the driver's: a dry run"
    )
    library = parser.parse_args().library
    if library is not None:
        # By its soname: what opens libcuda.so.1 from here on finds it.
        library = library.resolve()
        ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL)
    try:
        driver = open_driver(0)
    except RuntimeError as error:
        print(f"no GPU to check: {error}", file=sys.stderr)
        return 2
    name = cuda.deviceGetName(cuda.deviceGet(0))
    print(f"{name}{'' if library is None else ', a dry run: nothing here was seen on a GPU'}")
    rows = [
        conformance(library),
        *(Row(*price) for price in prices.calls(driver)),
        Row(*prices.reclaim(driver)),
        *kernels(library),
    ]
    for row in rows:
        print(f"{row.figure:48}{row.value:>44}  {row.verdict}".rstrip())
    verdicts = {row.verdict for row in rows}
    return 1 if FAILED in verdicts or (library is None and kernels_missing(rows)) else 0


def kernels_missing(rows: list[Row]) -> bool:
    """Whether the kernels did not run, without which the table shows little of a GPU."""
    return any(row.verdict == NOT_RUN and row.figure.startswith("kernels") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
