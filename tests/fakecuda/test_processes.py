"""Several processes on one device, a fork, and what happens to memory when its process dies."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.fakecuda.api import Driver
from tests.fakecuda.control import GRANULE, NOT_INITIALIZED, SUCCESS, FakeCuda, environment

ROOT = Path(__file__).parents[2]
TOTAL = 64 << 20

START = """
import sys
from tests.fakecuda.api import Driver, declare
from tests.fakecuda.control import GRANULE, load
fake = load()
driver = Driver(declare(fake.cu))
driver.start()
"""


SHOW_FREE = "print(driver.free_and_total()[0], flush=True)"


@contextmanager
def process(program: str, state: Path | None = None) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process that stays until the block ends, and the first line it printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", START + program + "\nprint('ready', flush=True)\nsys.stdin.read()"],
        env={**environment(total_bytes=TOTAL, state=state), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate(timeout=30)


def run(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", START + program],
        env={**environment(), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_processes_share_a_device_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with process("for _ in range(20): driver.create(GRANULE)\nfake.hog(2 * GRANULE)", state) as (hog, _):
        with process(SHOW_FREE, state) as (_, free):
            assert int(free) == TOTAL - 22 * GRANULE
        hog.send_signal(signal.SIGKILL)
        hog.wait(30)
        with process(SHOW_FREE, state) as (_, free):
            assert int(free) == TOTAL


def test_a_process_without_shared_state_is_alone() -> None:
    with process("driver.create(GRANULE)"), process(SHOW_FREE) as (_, free):
        assert int(free) == TOTAL


def test_a_forked_child_has_no_driver(fake: FakeCuda, driver: Driver) -> None:
    result = run(
        """
import os
child = os.fork()
if not child:
    os._exit(driver.cu.cuInit(0) * 10 + driver.cu.cuCtxSynchronize())
_, status = os.waitpid(child, 0)
assert driver.cu.cuCtxSynchronize() == 0
print(os.waitstatus_to_exitcode(status))
"""
    )
    assert result.stdout == f"{NOT_INITIALIZED * 11}\n", result.stderr


def test_a_forked_child_that_lives_on_holds_no_memory(tmp_path: Path) -> None:
    state = tmp_path / "state"
    fork = """
import os, signal
driver.create(GRANULE)
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
"""
    with process(fork, state) as (parent, child):
        try:
            parent.kill()
            parent.wait(30)
            with process(SHOW_FREE, state) as (_, free):
                assert int(free) == TOTAL
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_an_address_without_memory_faults() -> None:
    mapped = "import ctypes\naddress = driver.reserve(2 * GRANULE)\ndriver.map(address, GRANULE)\n"
    assert run(mapped + "ctypes.memset(address, 1, GRANULE)").returncode == 0
    assert run(mapped + "ctypes.memset(address, 1, GRANULE + 1)").returncode == -signal.SIGSEGV
    unmapped = mapped + "assert driver.cu.cuMemUnmap(address, GRANULE) == 0\nctypes.memset(address, 1, 1)"
    assert run(unmapped).returncode == -signal.SIGSEGV


def test_memory_without_access_faults() -> None:
    program = """
import ctypes
from tests.fakecuda.api import READ, access
address = driver.reserve(GRANULE)
assert driver.cu.cuMemMap(address, GRANULE, 0, driver.create(GRANULE), 0) == 0
"""
    assert run(program + "ctypes.memset(address, 1, 1)").returncode == -signal.SIGSEGV
    read = program + "assert driver.cu.cuMemSetAccess(address, GRANULE, access(0, flags=READ), 1) == 0\n"
    assert run(read + "ctypes.string_at(address, 1)").returncode == 0
    assert run(read + "ctypes.memset(address, 1, 1)").returncode == -signal.SIGSEGV


def test_torch_works_on_the_memory(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    for granule in range(2):
        driver.map(address + granule * GRANULE, GRANULE)
    memory = (ctypes.c_char * (2 * GRANULE)).from_address(address)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    tensor.copy_(torch.arange(len(tensor), dtype=torch.float32))
    assert tensor.sum().item() == torch.arange(len(tensor), dtype=torch.float32).sum().item()
    got = ctypes.create_string_buffer(4)
    assert fake.cu.cuMemcpyDtoH_v2(got, address + 4 * 7, 4) == SUCCESS
    assert got.raw == ctypes.string_at(address + 28, 4)
