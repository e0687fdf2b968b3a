"""Out of memory is real across processes, and what a dead process took is settled."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvquota.native import DeviceRecord, DriverError, HostDriver, OutOfMemoryError

from tests.native.arenas import GRANULE, TIMEOUT, two_tensors, wait_for

TAKER = """
import sys
from kvquota.native import HostDriver
driver = HostDriver()
driver.attach(int(sys.argv[1]))
handles = [driver.mem_create(2 << 20) for _ in range(int(sys.argv[2]))]
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def taker(record: DeviceRecord, granules: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that has taken `granules`."""
    command = [sys.executable, "-c", TAKER, str(record.fileno()), str(granules)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[record.fileno()]
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "taken\n"
            yield child
        finally:
            child.kill()


@pytest.fixture
def record() -> Iterator[DeviceRecord]:
    record = DeviceRecord.create(4 * GRANULE)
    yield record
    record.close()


def attached(record: DeviceRecord) -> HostDriver:
    driver = HostDriver()
    driver.attach(record.fileno())
    return driver


def test_out_of_memory_within_one_process(record: DeviceRecord) -> None:
    one, two = attached(record), attached(record)
    first = one.mem_create(3 * GRANULE)
    with pytest.raises(OutOfMemoryError, match="6291456 of the device's 8388608 bytes are taken"):
        two.mem_create(2 * GRANULE)
    assert (record.used_bytes, two.mem_get_info()) == (3 * GRANULE, (GRANULE, 4 * GRANULE))
    one.mem_release(first)
    two.mem_create(2 * GRANULE)
    assert record.used_bytes == 2 * GRANULE


def test_out_of_memory_across_processes_is_settled_by_sigkill(record: DeviceRecord) -> None:
    driver = attached(record)
    with taker(record, 3) as child:
        driver.mem_create(GRANULE)
        assert record.used_bytes == 4 * GRANULE
        with pytest.raises(OutOfMemoryError):
            driver.mem_create(GRANULE)
        child.kill()
        child.wait(TIMEOUT)
    assert record.used_bytes == GRANULE
    driver.mem_create(3 * GRANULE)


def test_many_dead_processes_leave_their_slots(record: DeviceRecord) -> None:
    for _ in range(3):
        with taker(record, 4) as child:
            child.kill()
            child.wait(TIMEOUT)
    assert record.used_bytes == 0


def test_an_arena_out_of_memory_refuses_and_gets_it_when_asked_again(record: DeviceRecord) -> None:
    driver = attached(record)
    arena = two_tensors(driver)
    with taker(record, 2):
        arena.ask(3, 0)
        report = wait_for(arena, lambda report: report.refused > 0)
        assert (report.created, report.refused, report.faults, report.held_bytes) == (0, 3, [], 0)
        assert record.used_bytes == 2 * GRANULE
    arena.ask(4, 0)
    assert arena.wait_credits(1, TIMEOUT) == 1
    arena.close()
    assert record.used_bytes == 0


def test_attaching_later_moves_what_is_taken(record: DeviceRecord) -> None:
    driver = HostDriver()
    handle = driver.mem_create(6 * GRANULE)
    driver.attach(record.fileno())
    assert record.used_bytes == 6 * GRANULE
    assert driver.mem_get_info() == (0, 4 * GRANULE)
    with pytest.raises(OutOfMemoryError):
        driver.mem_create(GRANULE)
    driver.mem_release(handle)
    assert record.used_bytes == 0
    driver.mem_create(4 * GRANULE)


def test_attaching_to_another_record_moves_from_the_old_one(record: DeviceRecord) -> None:
    driver = attached(record)
    driver.mem_create(2 * GRANULE)
    driver.attach(record.fileno())
    assert record.used_bytes == 2 * GRANULE
    later = DeviceRecord.create(8 * GRANULE)
    driver.attach(later.fileno())
    assert (record.used_bytes, later.used_bytes) == (0, 2 * GRANULE)
    later.close()


def test_closing_descriptors_of_a_record_frees_nothing(record: DeviceRecord) -> None:
    driver = attached(record)
    driver.mem_create(2 * GRANULE)
    os.close(os.dup(record.fileno()))
    DeviceRecord.open(record.fileno()).close()
    assert record.used_bytes == 2 * GRANULE


def test_a_driver_that_is_dropped_gives_its_share_back(record: DeviceRecord) -> None:
    driver = attached(record)
    driver.mem_create(2 * GRANULE)
    del driver
    assert record.used_bytes == 0


def test_every_slot_taken_is_an_error_that_says_so(record: DeviceRecord) -> None:
    small = 4096
    drivers = [HostDriver(granularity=small) for _ in range(257)]
    for driver in drivers:
        driver.attach(record.fileno())
    for driver in drivers[:256]:
        driver.mem_create(small)
    with pytest.raises(DriverError, match="every slot of the device record is taken"):
        drivers[256].mem_create(small)
    del drivers[0], driver
    drivers[-1].mem_create(small)
    assert record.used_bytes == 256 * small


def test_what_is_no_record_is_refused(record: DeviceRecord) -> None:
    driver = attached(record)
    memfd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        for descriptor, message in [
            (-1, "Bad file descriptor"),
            (file.fileno(), "not a memfd"),
            (memfd, "F_SEAL_SHRINK"),
        ]:
            with pytest.raises(ValueError, match=message):
                driver.attach(descriptor)
            with pytest.raises(ValueError, match=message):
                DeviceRecord.open(descriptor)
    os.close(memfd)
    driver.mem_create(4 * GRANULE)
    assert record.used_bytes == 4 * GRANULE


def test_a_closed_record_says_so(record: DeviceRecord) -> None:
    record.close()
    with pytest.raises(ValueError, match="closed"):
        assert record.used_bytes
    with pytest.raises(ValueError, match="capacity"):
        DeviceRecord.create(0)
