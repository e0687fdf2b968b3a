"""The check for GPUs, as far as it goes without one."""

import subprocess
import sys

from kvquota.native import HostDriver

from tests.fakecuda.control import build, environment
from tests.gpu import kernel

CHECK = [sys.executable, "-m", "tests.gpu.check"]


def test_without_a_gpu_it_says_so_and_fails() -> None:
    env = environment()
    del env["LD_LIBRARY_PATH"]
    result = subprocess.run(CHECK, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("no GPU to check: no NVIDIA driver here: libcuda.so.1")


def test_pages_come_and_go_under_torch() -> None:
    assert kernel.run(HostDriver(granularity=1 << 16), 0.2).endswith(" commands")


def test_a_dry_run_prints_the_table() -> None:
    command = [*CHECK, "--library", str(build())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert lines[0] == "Stand-in GPU, a dry run: nothing here was seen on a GPU"
    assert lines[1].startswith("conformance")
    assert lines[1].endswith("  ok")
    assert [line for line in lines if "64 MiB, 4 in one call" in line]
    assert [line for line in lines if line.startswith("reclaim") and "GiB/s" in line]
    assert [line for line in lines if line.startswith("kernels") and line.endswith("not run")]
