"""What is the host driver's own, beside the contract in test_driver_table.py."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from kvquota.native import DriverError, HostDriver

from tests.native.arenas import GRANULE, taken


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(fill=0xFF)


def mapped(driver: HostDriver, granules: int = 1) -> tuple[int, int]:
    """A reservation of `granules` with its first granule mapped: address and handle."""
    address = driver.address_reserve(granules * GRANULE)
    handle = driver.mem_create(GRANULE)
    driver.mem_map(address, GRANULE, handle)
    driver.mem_set_access(address, GRANULE)
    return address, handle


def test_fill_is_written_at_every_mapping(driver: HostDriver) -> None:
    address, handle = mapped(driver)
    assert ctypes.string_at(address, GRANULE) == b"\xff" * GRANULE
    ctypes.memset(address, 7, GRANULE)
    driver.mem_unmap(address, GRANULE)
    driver.mem_map(address, GRANULE, handle)
    driver.mem_set_access(address, GRANULE)
    assert ctypes.string_at(address, GRANULE) == b"\xff" * GRANULE


def test_contents_stay_with_the_handle() -> None:
    driver = HostDriver()
    address, handle = mapped(driver, granules=2)
    ctypes.memset(address, 7, GRANULE)
    driver.mem_unmap(address, GRANULE)
    driver.mem_map(address + GRANULE, GRANULE, handle)
    driver.mem_set_access(address + GRANULE, GRANULE)
    assert ctypes.string_at(address + GRANULE, GRANULE) == b"\x07" * GRANULE


@pytest.mark.parametrize("step", ["reserved", "mapped without access", "unmapped"])
def test_touching_what_is_not_mapped_faults(step: str) -> None:
    script = f"""
import ctypes
from kvquota.native import HostDriver
driver = HostDriver()
address = driver.address_reserve({GRANULE})
handle = driver.mem_create({GRANULE})
if {step!r} != "reserved":
    driver.mem_map(address, {GRANULE}, handle)
if {step!r} == "unmapped":
    driver.mem_set_access(address, {GRANULE})
    ctypes.c_char.from_address(address).value = b"x"
    driver.mem_unmap(address, {GRANULE})
print("touching", flush=True)
ctypes.c_char.from_address(address).value
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert (child.returncode, child.stdout) == (-signal.SIGSEGV, b"touching\n")


def test_errors_name_operation_code_and_value(driver: HostDriver) -> None:
    with pytest.raises(DriverError, match=r"mem_create failed with EINVAL.*: 1000 bytes") as caught:
        driver.mem_create(1000)
    error = caught.value
    assert (error.operation, error.code, error.name) == ("mem_create", errno.EINVAL, "EINVAL")
    assert error.page is None


def test_what_a_gpu_driver_refuses_is_refused(driver: HostDriver) -> None:
    address, handle = mapped(driver, granules=2)
    other = driver.mem_create(GRANULE)
    refused: list[tuple[Callable[[], object], int]] = [
        (lambda: driver.mem_map(address, GRANULE, other), errno.EEXIST),
        (lambda: driver.mem_map(address + 2 * GRANULE, GRANULE, other), errno.EINVAL),
        (lambda: driver.mem_map(address + 4096, GRANULE, other), errno.EINVAL),
        (lambda: driver.mem_map(address + GRANULE, 2 * GRANULE, other), errno.EINVAL),
        (lambda: driver.mem_map(address + GRANULE, GRANULE, 10**6), errno.EINVAL),
        (lambda: driver.mem_unmap(address + GRANULE, GRANULE), errno.EINVAL),
        (lambda: driver.mem_unmap(address, 2 * GRANULE), errno.EINVAL),
        (lambda: driver.mem_unmap(address, 4096), errno.EINVAL),
        (lambda: driver.mem_set_access(address + GRANULE, GRANULE), errno.EINVAL),
        (lambda: driver.mem_release(10**6), errno.EINVAL),
        (lambda: driver.address_free(address, 2 * GRANULE), errno.EBUSY),
        (lambda: driver.address_free(address, GRANULE), errno.EINVAL),
        (lambda: driver.address_reserve(1 << 62), errno.ENOMEM),
    ]
    for call, code in refused:
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == code
    driver.mem_release(handle)
    with pytest.raises(DriverError, match="unknown or released"):
        driver.mem_release(handle)
    assert taken(driver) == 2 * GRANULE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"granularity": 3 << 20}, "granularity 3145728 bytes"),
        ({"granularity": 1024}, "granularity 1024 bytes"),
        ({"granularity": -1}, "granularity is -1"),
        ({"fill": 256}, "fill is 256"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostDriver(**arguments)


def test_mem_get_info_is_the_hosts_without_a_record(driver: HostDriver) -> None:
    free, total = driver.mem_get_info()
    assert 0 < free <= total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_dropping_the_driver_gives_its_memory_back() -> None:
    driver = HostDriver()
    address, _ = mapped(driver)
    descriptor = driver.fileno()
    del driver
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if line.startswith(f"{address:x}-")]
