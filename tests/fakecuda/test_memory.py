"""What may be reserved, created, mapped, unmapped and freed, and what the driver says where it may not."""

import ctypes
from ctypes import byref, c_uint64

import pytest

from tests.fakecuda.api import NONE, READ, READWRITE, Driver, Location, Properties, access, on
from tests.fakecuda.control import (
    GRANULE,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SUCCESS,
    FakeCuda,
    Live,
)


def test_a_life_leaves_nothing(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(4 * GRANULE)
    handle = driver.map(address, GRANULE)
    assert fake.live() == Live(contexts=1, reservations=1, mappings=1, handles=1, bytes=GRANULE)
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    assert fake.cu.cuMemAddressFree(address, 4 * GRANULE) == SUCCESS
    assert fake.cu.cuDevicePrimaryCtxRelease_v2(0) == SUCCESS
    assert fake.live() == Live()


def test_memory_is_real_and_the_same_wherever_it_is_mapped(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    handle = driver.map(address, GRANULE)
    assert fake.cu.cuMemMap(address + GRANULE, GRANULE, 0, handle, 0) == SUCCESS
    assert fake.cu.cuMemSetAccess(address + GRANULE, GRANULE, access(0), 1) == SUCCESS
    assert fake.cu.cuMemsetD8_v2(address + 5, 0x5A, 3) == SUCCESS
    assert ctypes.string_at(address + GRANULE + 5, 3) == b"\x5a" * 3


def test_new_memory_does_not_show_what_old_memory_held(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(GRANULE)
    handle = driver.map(address, GRANULE)
    ctypes.memset(address, 0x77, GRANULE)
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    fake.fill(0xFF)
    driver.map(address, GRANULE)
    assert ctypes.string_at(address, GRANULE) == b"\xff" * GRANULE


@pytest.mark.parametrize(
    ("size", "alignment", "hint", "flags"),
    [
        (0, 0, 0, 0),
        (GRANULE + 1, 0, 0, 0),
        (GRANULE, 3 << 20, 0, 0),
        (GRANULE, 0, 7, 0),
        (GRANULE, 0, 0, 1),
    ],
)
def test_reserve_refuses(
    fake: FakeCuda, driver: Driver, size: int, alignment: int, hint: int, flags: int
) -> None:
    address = c_uint64(1)
    assert fake.cu.cuMemAddressReserve(byref(address), size, alignment, hint, flags) == INVALID_VALUE
    assert address.value == 1
    assert fake.live().reservations == 0


def test_a_reservation_is_aligned_as_asked(driver: Driver) -> None:
    assert driver.reserve(GRANULE, 64 << 20) % (64 << 20) == 0
    assert driver.reserve(GRANULE) % GRANULE == 0


def test_more_addresses_than_there_are(fake: FakeCuda, driver: Driver) -> None:
    assert fake.cu.cuMemAddressReserve(byref(c_uint64()), 1 << 48, 0, 0, 0) == OUT_OF_MEMORY


def test_only_a_whole_reservation_without_mappings_is_freed(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(4 * GRANULE)
    driver.map(address + GRANULE, GRANULE)
    assert fake.cu.cuMemAddressFree(address, 4 * GRANULE) == INVALID_VALUE
    assert fake.cu.cuMemUnmap(address + GRANULE, GRANULE) == SUCCESS
    assert fake.cu.cuMemAddressFree(address, 2 * GRANULE) == INVALID_VALUE
    assert fake.cu.cuMemAddressFree(address + GRANULE, 3 * GRANULE) == INVALID_VALUE
    assert fake.cu.cuMemAddressFree(address, 4 * GRANULE) == SUCCESS
    assert fake.cu.cuMemAddressFree(address, 4 * GRANULE) == INVALID_VALUE


@pytest.mark.parametrize(
    ("size", "properties", "flags", "error"),
    [
        (0, on(), 0, INVALID_VALUE),
        (GRANULE - 4096, on(), 0, INVALID_VALUE),
        (GRANULE, on(), 1, INVALID_VALUE),
        (GRANULE, on(2), 0, INVALID_DEVICE),
        (GRANULE, on(-1), 0, INVALID_DEVICE),
        (GRANULE, Properties(type=0, location=Location(1, 0)), 0, INVALID_VALUE),
        (GRANULE, Properties(type=1, location=Location(0, 0)), 0, INVALID_VALUE),
        (GRANULE, Properties(type=1, location=Location(4, 0)), 0, INVALID_VALUE),
        (GRANULE, Properties(type=1, location=Location(2, 0)), 0, NOT_SUPPORTED),
        (GRANULE, Properties(type=1, requested_handle_types=8, location=Location(1, 0)), 0, NOT_SUPPORTED),
    ],
)
def test_create_refuses(
    fake: FakeCuda, driver: Driver, size: int, properties: Properties, flags: int, error: int
) -> None:
    assert fake.cu.cuMemCreate(byref(c_uint64()), size, byref(properties), flags) == error
    assert fake.live().bytes == 0


def test_create_needs_no_context(fake: FakeCuda) -> None:
    assert fake.cu.cuInit(0) == SUCCESS
    handle = Driver(fake.cu).create(GRANULE)
    assert fake.cu.cuMemRelease(handle) == SUCCESS


def test_memory_runs_out_and_comes_back(fake: FakeCuda, driver: Driver) -> None:
    handles = [driver.create(16 << 20) for _ in range(4)]
    assert driver.free_and_total() == (0, 64 << 20)
    assert fake.cu.cuMemCreate(byref(c_uint64()), GRANULE, byref(on()), 0) == OUT_OF_MEMORY
    assert fake.cu.cuMemRelease(handles[0]) == SUCCESS
    assert driver.free_and_total() == (16 << 20, 64 << 20)
    driver.create(GRANULE, device=1)
    driver.create(GRANULE)


def test_memory_released_while_mapped_stays_until_it_is_unmapped(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(GRANULE)
    handle = driver.map(address, GRANULE)
    ctypes.memset(address, 0x33, 8)
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    assert ctypes.string_at(address, 8) == b"\x33" * 8
    assert driver.free_and_total()[0] == (64 << 20) - GRANULE
    assert fake.cu.cuMemRelease(handle) == INVALID_VALUE
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert driver.free_and_total()[0] == 64 << 20


def test_a_released_handle_maps_no_more(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    handle = driver.map(address, GRANULE)
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    assert fake.cu.cuMemMap(address + GRANULE, GRANULE, 0, handle, 0) == INVALID_VALUE
    assert fake.cu.cuMemMap(address + GRANULE, GRANULE, 0, 12345, 0) == INVALID_VALUE
    assert fake.cu.cuMemRelease(12345) == INVALID_VALUE


def test_a_retained_handle_counts(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    handle = driver.map(address, GRANULE)
    again = c_uint64()
    assert fake.cu.cuMemRetainAllocationHandle(byref(again), address + 4096) == SUCCESS
    assert again.value == handle
    assert fake.cu.cuMemRetainAllocationHandle(byref(again), address + GRANULE) == INVALID_VALUE
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    assert fake.live().handles == 1
    properties = Properties()
    assert fake.cu.cuMemGetAllocationPropertiesFromHandle(byref(properties), handle) == SUCCESS
    assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 0)
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    assert fake.live().handles == 0


def test_map_refuses(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(4 * GRANULE)
    handle = driver.create(2 * GRANULE)
    cu_map = fake.cu.cuMemMap
    assert cu_map(address, 0, 0, handle, 0) == INVALID_VALUE
    assert cu_map(address, GRANULE // 2, 0, handle, 0) == INVALID_VALUE
    assert cu_map(address + 4096, GRANULE, 0, handle, 0) == INVALID_VALUE
    assert cu_map(address, GRANULE, GRANULE, handle, 0) == INVALID_VALUE  # an offset
    assert cu_map(address, GRANULE, 0, handle, 1) == INVALID_VALUE  # flags
    assert cu_map(address, 3 * GRANULE, 0, handle, 0) == INVALID_VALUE  # more than there is
    assert cu_map(address - GRANULE, GRANULE, 0, handle, 0) == INVALID_VALUE  # not reserved
    assert cu_map(address + 3 * GRANULE, 2 * GRANULE, 0, handle, 0) == INVALID_VALUE  # past the end
    assert cu_map(0, GRANULE, 0, handle, 0) == INVALID_VALUE
    assert cu_map(2**64 - GRANULE, GRANULE, 0, handle, 0) == INVALID_VALUE
    assert fake.live().mappings == 0
    assert cu_map(address + GRANULE, 2 * GRANULE, 0, handle, 0) == SUCCESS
    other = driver.create(2 * GRANULE)
    assert cu_map(address + GRANULE, 2 * GRANULE, 0, handle, 0) == INVALID_VALUE  # the same again
    assert cu_map(address, 2 * GRANULE, 0, other, 0) == INVALID_VALUE  # over its start
    assert cu_map(address + 2 * GRANULE, 2 * GRANULE, 0, other, 0) == INVALID_VALUE  # over its end
    assert cu_map(address, GRANULE, 0, other, 0) == SUCCESS
    assert cu_map(address + 3 * GRANULE, GRANULE, 0, other, 0) == SUCCESS


def test_unmap_takes_whole_mappings_only(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(8 * GRANULE)
    driver.map(address, 2 * GRANULE)
    driver.map(address + 2 * GRANULE, GRANULE)
    driver.map(address + 4 * GRANULE, GRANULE)
    unmap = fake.cu.cuMemUnmap
    assert unmap(address, GRANULE) == INVALID_VALUE
    assert unmap(address + GRANULE, GRANULE) == INVALID_VALUE
    assert unmap(address + GRANULE, 2 * GRANULE) == INVALID_VALUE
    assert unmap(address, 0) == INVALID_VALUE
    assert unmap(address, 5 * GRANULE) == INVALID_VALUE  # with a hole
    assert unmap(address + 3 * GRANULE, GRANULE) == INVALID_VALUE  # nothing there
    assert unmap(address, 4 * GRANULE) == INVALID_VALUE  # more than there is
    assert fake.live().mappings == 3
    assert unmap(address, 3 * GRANULE) == SUCCESS  # two that follow each other
    assert unmap(address, 3 * GRANULE) == INVALID_VALUE
    assert fake.live().mappings == 1


def test_access_is_set_over_whole_mappings_only(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(4 * GRANULE)
    for granule in (0, 1, 3):
        assert fake.cu.cuMemMap(address + granule * GRANULE, GRANULE, 0, driver.create(GRANULE), 0) == SUCCESS
    set_access = fake.cu.cuMemSetAccess
    assert set_access(address, 4 * GRANULE, access(0), 1) == INVALID_VALUE  # granule 2 is not mapped
    assert set_access(address + 2 * GRANULE, GRANULE, access(0), 1) == INVALID_VALUE
    assert set_access(address, GRANULE // 2, access(0), 1) == INVALID_VALUE
    assert set_access(address, 0, access(0), 1) == INVALID_VALUE
    assert set_access(address, GRANULE, None, 1) == INVALID_VALUE
    assert set_access(address, GRANULE, access(0), 0) == INVALID_VALUE
    assert set_access(address, GRANULE, access(0, flags=2), 1) == INVALID_VALUE
    assert set_access(address, GRANULE, access(2), 1) == INVALID_DEVICE
    assert access_of(fake, address) == NONE
    assert set_access(address, 2 * GRANULE, access(0), 1) == SUCCESS  # two in one call
    found = [access_of(fake, address + granule * GRANULE) for granule in (0, 1, 3)]
    assert found == [READWRITE, READWRITE, NONE]


def access_of(fake: FakeCuda, address: int, device: int = 0) -> int:
    flags = c_uint64()
    assert fake.cu.cuMemGetAccess(byref(flags), byref(Location(1, device)), address) == SUCCESS
    return flags.value


def test_access_is_of_a_device_and_ends_with_the_mapping(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(GRANULE)
    driver.map(address, GRANULE)
    assert access_of(fake, address, 1) == NONE
    assert fake.cu.cuMemSetAccess(address, GRANULE, access(1, flags=READ), 1) == SUCCESS
    assert [access_of(fake, address, device) for device in (0, 1)] == [READWRITE, READ]
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert fake.cu.cuMemGetAccess(byref(c_uint64()), byref(Location(1, 0)), address) == INVALID_VALUE
    assert fake.cu.cuMemMap(address, GRANULE, 0, driver.create(GRANULE), 0) == SUCCESS
    assert access_of(fake, address) == NONE


def test_a_context_copies_only_what_its_device_may_touch(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(2 * GRANULE)
    driver.map(address, GRANULE)
    got = ctypes.create_string_buffer(4)
    assert fake.cu.cuMemcpyHtoD_v2(address, b"data", 4) == SUCCESS
    assert fake.cu.cuMemcpyDtoH_v2(got, address, 4) == SUCCESS
    assert got.raw == b"data"
    assert fake.cu.cuMemcpyDtoH_v2(got, address + GRANULE - 2, 4) == INVALID_VALUE
    assert fake.cu.cuCtxSetCurrent(driver.retain(1)) == SUCCESS
    assert fake.cu.cuMemcpyDtoH_v2(got, address, 4) == INVALID_VALUE


def test_granularity(fake: FakeCuda, driver: Driver) -> None:
    granularity = ctypes.c_size_t()
    for option in (0, 1):
        assert fake.cu.cuMemGetAllocationGranularity(byref(granularity), byref(on()), option) == SUCCESS
        assert granularity.value == GRANULE
    assert fake.cu.cuMemGetAllocationGranularity(byref(granularity), byref(on()), 2) == INVALID_VALUE
    assert fake.cu.cuMemGetAllocationGranularity(byref(granularity), byref(on(9)), 0) == INVALID_DEVICE
