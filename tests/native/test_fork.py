"""A forked child holds nothing of its parent's memory, whatever becomes of the parent."""

import os
import signal
import subprocess
import sys

from kvquota.native import DeviceRecord

from tests.native.arenas import GRANULE, TIMEOUT

# The parent takes two pages and forks. The child reports what it inherited, tries the arena, and stays.
PARENT = """
import os, signal, sys
from kvquota.native import Arena, HostDriver
driver = HostDriver()
driver.attach(int(sys.argv[1]))
arena = Arena(driver, [2 << 20, 4 << 20], 64)
arena.ask(2, 0)
arena.wait_credits(2, 30)
arena.apply(1, [3], [])
capsule = arena.dlpack(0, [16], 1, 8)
if os.fork() == 0:
    os.close(int(sys.argv[1]))
    with open("/proc/self/maps") as maps:
        inherited = [line for line in maps if "memfd:" in line or line.startswith(f"{arena.base:x}-")]
    descriptors = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    inherited += [path for path in descriptors if os.path.islink(path) and "memfd:" in os.readlink(path)]
    refused = []
    for call in (
        arena.report,
        arena.fileno,
        lambda: arena.ask(3, 0),
        lambda: arena.apply(2, [4], []),
        lambda: arena.wait_credits(3, 1),
        lambda: arena.dlpack(0, [16], 1, 8),
        lambda: Arena(driver, [2 << 20], 1),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            refused.append("forked" in str(error))
    arena.close()
    del arena, capsule, driver
    print(inherited, refused, flush=True)
    signal.pause()
arena.apply(2, [4], [])
sys.stdin.read()
arena.report()
print("parent unharmed", flush=True)
sys.stdin.close()
signal.pause()
"""


def test_a_forked_child_keeps_no_memory_alive() -> None:
    record = DeviceRecord.create(64 * GRANULE)
    command = [sys.executable, "-W", "ignore", "-c", PARENT, str(record.fileno())]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[record.fileno()],
        start_new_session=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdin is not None
            assert parent.stdout.readline() == f"[] {[True] * 7}\n"
            parent.stdin.close()
            assert parent.stdout.readline() == "parent unharmed\n"
            assert record.used_bytes == 2 * 3 * GRANULE
            parent.kill()
            parent.wait(TIMEOUT)
            # The child still lives: the process group is not empty.
            os.killpg(parent.pid, 0)
            assert record.used_bytes == 0
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    record.close()


def test_forks_while_the_worker_is_busy_neither_hang_nor_break() -> None:
    script = """
import os
from kvquota.native import Arena, HostDriver
driver = HostDriver(granularity=4096)
arena = Arena(driver, [4096] * 4, 4096)
for turn in range(60):
    arena.ask(8 * (turn + 1), 0)
    child = os.fork()
    if child == 0:
        del arena, driver
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    arena.wait_credits(8 * (turn + 1), 30)
    pages = list(range(8 * turn, 8 * turn + 8))
    arena.apply(turn + 1, pages, [page - 8 for page in pages if page >= 8])
arena.close()
print(os.fstat(driver.fileno()).st_blocks)
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == "0\n"


def test_the_interpreter_ends_while_an_arena_is_at_work() -> None:
    script = """
from kvquota.native import Arena, HostDriver
arena = Arena(HostDriver(), [2 << 20], 1000)
arena.ask(8, 0)
keep = arena.dlpack(0, [16], 1, 8)
arena.ask(1000, 900)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
