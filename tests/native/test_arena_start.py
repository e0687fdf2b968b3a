"""What an arena costs before a page is used: nothing for each page."""

import ctypes
import os
import threading
import time

import pytest
from kvquota.native import Arena, FaultDriver, HostDriver

from tests.native.arenas import GRANULE, TIMEOUT, ask, done, taken, two_tensors

CALLS = [
    "address_reserve",
    "mem_create",
    "mem_map",
    "mem_set_access",
    "mem_unmap",
    "mem_release",
    "event_record",
]


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def cost_of_start(size: int) -> tuple[list[int], int, int]:
    """What an arena of `size` bytes starts with: driver calls, mappings, whole MiB of memory."""
    driver = FaultDriver(HostDriver())
    before = mappings(), resident()
    arena = Arena(driver, [GRANULE] * 8, size // GRANULE // 8)
    after = mappings(), resident()
    calls = [driver.calls(operation) for operation in CALLS]
    arena.close()
    return calls, after[0] - before[0], (after[1] - before[1]) >> 20


def test_64_gib_start_as_cheaply_as_1_gib() -> None:
    cost_of_start(1 << 30)
    small, large = cost_of_start(1 << 30), cost_of_start(64 << 30)
    assert large == small
    assert small[0] == [1, 0, 0, 0, 0, 0, 0]


def test_the_far_end_of_64_gib_is_usable() -> None:
    driver = HostDriver(fill=0xFF)
    arena = Arena(driver, [GRANULE] * 8, 4096)
    ask(arena, 1)
    arena.apply(1, [4095], [])
    last = arena.base + arena.size - 1
    assert ctypes.string_at(last, 1) == b"\xff"
    arena.apply(2, [], [4095])
    done(arena, 2)
    arena.close()
    assert taken(driver) == 0


def test_addresses_and_threads_are_given_back_at_close() -> None:
    driver = HostDriver()
    threads = threads_of_arenas()
    before = mappings()
    for _ in range(50):
        arena = two_tensors(driver)
        ask(arena, 2)
        arena.apply(1, [0, 2], [])
        arena.close()
    assert threads_of_arenas() == threads
    assert mappings() <= before + 2


def threads_of_arenas() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return names.count("kvquota-arena")


def test_waiting_for_credits_lets_other_python_threads_run() -> None:
    arena = two_tensors(HostDriver())
    arena.ask(1, 0)
    arena.wait_credits(1, TIMEOUT)
    started = threading.Event()

    def ask_more() -> None:
        started.wait(TIMEOUT)
        arena.ask(3, 0)

    thread = threading.Thread(target=ask_more)
    thread.start()
    started.set()
    deadline = time.monotonic() + TIMEOUT
    while arena.wait_credits(3, TIMEOUT) < 3:
        assert time.monotonic() < deadline
    thread.join(TIMEOUT)
    arena.close()


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_impossible_time_outs_are_refused(timeout: float) -> None:
    arena = two_tensors(HostDriver())
    with pytest.raises(ValueError, match="timeout is"):
        arena.wait_credits(1, timeout)
    arena.close()
