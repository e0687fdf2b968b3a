"""The driver table's contract, as every driver keeps it."""

from collections.abc import Callable, Iterator

import pytest
from kvquota.native import Driver, DriverError, OutOfMemoryError

from tests.native.arenas import GRANULE
from tests.native.devices import CAPACITY, Device, on_gpu

SIZE = 4 * GRANULE


@pytest.fixture
def driver(device: Device) -> Driver:
    return device.driver


@pytest.fixture
def address(driver: Driver) -> Iterator[int]:
    """A reservation of four granules, which a test leaves without mappings."""
    address = driver.address_reserve(SIZE)
    assert address % GRANULE == 0
    yield address
    driver.address_free(address, SIZE)


def map_new(driver: Driver, address: int) -> int:
    """Map new memory of a granule, and return its handle."""
    handle = driver.mem_create(GRANULE)
    driver.mem_map(address, GRANULE, handle)
    driver.mem_set_access(address, GRANULE)
    return handle


def test_memory_is_there_from_create_to_release(device: Device, driver: Driver) -> None:
    handle = driver.mem_create(3 * GRANULE)
    assert device.taken() == 3 * GRANULE
    driver.mem_release(handle)
    assert device.taken() == 0


def test_a_reservation_takes_no_memory(device: Device, driver: Driver) -> None:
    address = driver.address_reserve(64 << 30)
    assert device.taken() == 0
    driver.address_free(address, 64 << 30)


def test_neighbours_hold_what_is_written_over_their_border(
    device: Device, driver: Driver, address: int
) -> None:
    handles = [map_new(driver, address + granule * GRANULE) for granule in (1, 2)]
    border = address + 2 * GRANULE
    device.write(border - 3, b"border")
    assert device.read(border - 3, 6) == b"border"
    driver.mem_unmap(address + GRANULE, 2 * GRANULE)
    for handle in handles:
        driver.mem_release(handle)


def test_released_memory_stays_while_it_is_mapped(device: Device, driver: Driver, address: int) -> None:
    handle = map_new(driver, address)
    driver.mem_release(handle)
    device.write(address, b"here")
    assert (device.taken(), device.read(address, 4)) == (GRANULE, b"here")
    driver.mem_unmap(address, GRANULE)
    assert device.taken() == 0


def test_one_access_and_one_unmap_cover_a_run_of_mappings(
    device: Device, driver: Driver, address: int
) -> None:
    handles = [driver.mem_create(GRANULE) for _ in range(4)]
    for granule, handle in enumerate(handles):
        driver.mem_map(address + granule * GRANULE, GRANULE, handle)
    driver.mem_set_access(address, SIZE)
    device.write(address + SIZE - 4, b"last")
    driver.mem_unmap(address, SIZE)
    for handle in handles:
        driver.mem_release(handle)
    assert device.taken() == 0


def test_what_a_gpu_driver_refuses_is_refused(device: Device, driver: Driver, address: int) -> None:
    handle = map_new(driver, address)
    other = driver.mem_create(GRANULE)
    refused: list[Callable[[], object]] = [
        lambda: driver.mem_create(1000),
        lambda: driver.mem_create(0),
        lambda: driver.mem_map(address, GRANULE, other),
        lambda: driver.mem_map(address + SIZE, GRANULE, other),
        lambda: driver.mem_map(address + 4096, GRANULE, other),
        lambda: driver.mem_map(address + GRANULE, 2 * GRANULE, other),
        lambda: driver.mem_unmap(address + GRANULE, GRANULE),
        lambda: driver.mem_unmap(address, 2 * GRANULE),
        lambda: driver.mem_unmap(address, 4096),
        lambda: driver.mem_set_access(address + GRANULE, GRANULE),
        lambda: driver.address_free(address, SIZE),
        lambda: driver.address_free(address, GRANULE),
        lambda: driver.address_reserve(0),
    ]
    if not on_gpu():
        # A real driver takes a handle for a pointer of its own.
        refused += [
            lambda: driver.mem_map(address + GRANULE, GRANULE, 10**6),
            lambda: driver.mem_release(10**6),
        ]
    for call in refused:
        with pytest.raises(DriverError) as caught:
            call()
        assert not isinstance(caught.value, OutOfMemoryError)
    assert device.taken() == 2 * GRANULE
    driver.mem_unmap(address, GRANULE)
    driver.mem_release(handle)
    driver.mem_release(other)


def test_out_of_memory_is_a_type_of_its_own(device: Device, driver: Driver) -> None:
    free, total = driver.mem_get_info()
    assert free <= total
    if not on_gpu():
        assert (free, total) == (CAPACITY, CAPACITY)
    with pytest.raises(OutOfMemoryError, match=f"mem_create failed with .*{total + GRANULE} bytes") as caught:
        driver.mem_create(total + GRANULE)
    assert caught.value.operation == "mem_create"
    assert (device.taken(), driver.mem_get_info()) == (0, (free, total))


def test_fences_pass(driver: Driver) -> None:
    event = driver.event_record()
    driver.event_synchronize(event)
    assert driver.event_query(event)
    driver.event_destroy(event)
