"""What a step with nothing to do costs: time, and system calls. Exits 1 where a bound is missed."""

import ctypes
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvquota.agent import Agent, Settings
from kvquota.agent.contract import Counters
from kvquota.agent.local_rank import LocalRank
from kvquota.native import Arena, HostDriver, PageQueue

from tests.agent.fake_daemon import FakeDaemon

BOUND_NS = 1000
STEPS = 1_000
ROUNDS = 1_000
PAGES, BLOCKS_PER_PAGE = 64, 32

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06


class Block:
    __slots__ = ("block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0


class BenchAdapter:
    """An adapter with nothing between the agent and the native queue."""

    engine = "bench 1"

    def __init__(self) -> None:
        blocks = [Block(n) for n in range(PAGES * BLOCKS_PER_PAGE)]
        pages = [(n * BLOCKS_PER_PAGE, (n + 1) * BLOCKS_PER_PAGE) for n in range(PAGES)]
        self.queue = PageQueue(blocks, pages)
        self.usage = self.queue.usage
        self.allow = self.queue.allow
        self.grown = self.queue.grown

    def take(self, pages: int) -> list[int]:
        raise AssertionError(f"nothing is to be taken, and {pages} pages are asked for")

    def give(self, pages: Sequence[int]) -> None:
        raise AssertionError(f"nothing was taken, and {pages} come back")

    def drain(self, pages: int) -> None:
        raise AssertionError(f"nothing is to be drained, and {pages} pages are asked for")

    def take_floor(self) -> list[int]:
        raise AssertionError("nothing sleeps")

    def put_floor(self) -> None:
        raise AssertionError("nothing sleeps")

    def wanted(self) -> int:
        return 0

    def busy(self) -> bool:
        return True

    def counters(self) -> Counters:
        return Counters()

    def wake(self) -> None:
        pass


def steps(begin: Callable[[], None], end: Callable[[], object], count: int) -> None:
    for _ in range(count):
        begin()
        end()


def nothing() -> None:
    pass


def fastest_ns(begin: Callable[[], None], end: Callable[[], object]) -> float:
    """Of many short rounds, in CPU time: what else runs on the machine is none of a step's cost."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time_ns()
        steps(begin, end, STEPS)
        best = min(best, (time.thread_time_ns() - start) / STEPS)
    return best


def forbid_system_calls() -> None:
    """From here on any system call but exit_group kills the thread's process."""
    exit_group = 231 if os.uname().machine == "x86_64" else 94
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (_LOAD, 0, 0, 0),
            (_EQUAL, 0, 1, exit_group),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _KILL),
        )
    )
    filters = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def survives_without_system_calls(begin: Callable[[], None], end: Callable[[], object]) -> bool:
    """Run steps in a child that any system call kills."""
    pid = os.fork()
    if pid == 0:
        steps(begin, end, 10)
        forbid_system_calls()
        steps(begin, end, 10_000)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        return False
    if status != 0:
        raise RuntimeError(f"the child without system calls ended with {status}")
    return True


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, FakeDaemon(Path(folder) / "agent.sock") as daemon:
        driver = HostDriver()
        arena = Arena(driver, [2 << 20], PAGES)
        rank = LocalRank(arena, driver)
        settings = Settings("bench", socket=Path(folder) / "agent.sock", reserve_bytes=8 << 20)
        agent = Agent(BenchAdapter(), [rank], pages=PAGES, floor=0, settings=settings)
        connection = daemon.connection()
        # The reserve is created and reported; from here on nothing is left to do.
        arena.wait_credits(4, 10.0)
        connection.wait(lambda seen: seen.credits == 4, lambda: steps(agent.begin_step, agent.end_step, 1))
        before = connection.read().step
        cost = fastest_ns(agent.begin_step, agent.end_step) - fastest_ns(nothing, nothing)
        counted = connection.read().step - before
        if counted != ROUNDS * STEPS:
            raise RuntimeError(f"{counted} steps reached the segment: expected {ROUNDS * STEPS}")
        quiet = survives_without_system_calls(agent.begin_step, agent.end_step)
        if survives_without_system_calls(nothing, os.getppid):
            raise RuntimeError("the filter lets system calls through: it proves nothing here")
        agent.close()
        arena.close()
    rows = [
        ("a step with nothing to do", f"{cost:.0f} ns", f"< {BOUND_NS} ns", cost < BOUND_NS),
        ("system calls in 10,000 such steps", "0" if quiet else "some", "0", quiet),
    ]
    print(f"{'figure':36}{'measured':>12}{'bound':>12}  verdict")
    for figure, measured, bound, held in rows:
        print(f"{figure:36}{measured:>12}{bound:>12}  {'ok' if held else 'MISSED'}")
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
