"""What a test can tell the stand-in to do, and ask it."""

import threading
import time
from ctypes import byref, c_uint64

import pytest

from tests.fakecuda.api import Driver, access, on
from tests.fakecuda.control import (
    A100,
    GRANULE,
    OUT_OF_MEMORY,
    SUCCESS,
    UNKNOWN,
    FakeCuda,
    Live,
)


def create(fake: FakeCuda) -> int:
    status: int = fake.cu.cuMemCreate(byref(c_uint64()), GRANULE, byref(on()), 0)
    return status


def test_the_nth_call_fails_and_does_nothing(fake: FakeCuda, driver: Driver) -> None:
    assert create(fake) == SUCCESS
    fake.fail("cuMemCreate", nth=2, times=2, code=OUT_OF_MEMORY)
    assert [create(fake) for _ in range(4)] == [SUCCESS, OUT_OF_MEMORY, OUT_OF_MEMORY, SUCCESS]
    assert fake.live().handles == 3
    assert fake.calls("cuMemCreate") == 5


def test_the_first_of_two_failures_that_fit_counts(fake: FakeCuda, driver: Driver) -> None:
    fake.fail("cuMemCreate", code=OUT_OF_MEMORY)
    fake.fail("cuMemCreate", times=2)
    assert [create(fake) for _ in range(3)] == [OUT_OF_MEMORY, UNKNOWN, SUCCESS]


def test_calls_are_counted_by_thread(fake: FakeCuda, driver: Driver) -> None:
    counted: list[int] = []

    def work() -> None:
        create(fake)
        create(fake)
        counted.append(fake.calls("cuMemCreate", threading.get_native_id()))

    other = threading.Thread(target=work)
    other.start()
    other.join(30)
    create(fake)
    assert counted == [2]
    assert fake.calls("cuMemCreate", threading.get_native_id()) == 1
    assert fake.calls("cuMemCreate") == 3


def test_a_price_is_paid_for_each_call_and_granule(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(8 * GRANULE)
    for granule in range(8):
        assert fake.cu.cuMemMap(address + granule * GRANULE, GRANULE, 0, driver.create(GRANULE), 0) == SUCCESS
    fake.price("cuMemSetAccess", fixed_us=4000, granule_us=1000)
    assert fake.charged() == 0
    # At least the price, by its own clock: a busy machine only adds to it.
    started = time.monotonic()
    assert fake.cu.cuMemSetAccess(address, 8 * GRANULE, access(0), 1) == SUCCESS
    assert time.monotonic() - started >= 0.012
    assert fake.charged() == fake.charged(threading.get_native_id()) == 12_000
    assert fake.charged(1) == 0
    fake.prices(A100)  # all are names of entry points


def test_names_that_are_none_are_refused(fake: FakeCuda) -> None:
    for call in (
        lambda: fake.fail("cuMemMapp"),
        lambda: fake.calls("cuMemGetInfo_v2"),
        lambda: fake.price("mem_map", 1),
    ):
        with pytest.raises(ValueError, match="no entry point"):
            call()


def test_total_memory_changes_and_a_hog_takes_it(fake: FakeCuda, driver: Driver) -> None:
    fake.memory(4 * GRANULE)
    fake.hog(3 * GRANULE)
    assert driver.free_and_total() == (GRANULE, 4 * GRANULE)
    assert [create(fake), create(fake)] == [SUCCESS, OUT_OF_MEMORY]
    with pytest.raises(ValueError, match="has not"):
        fake.hog(4 * GRANULE)
    fake.hog(0)
    assert driver.free_and_total() == (3 * GRANULE, 4 * GRANULE)
    fake.memory(0)
    assert driver.free_and_total() == (0, 0)
    assert create(fake) == OUT_OF_MEMORY


def test_without_data_only_the_books_are_kept(fake: FakeCuda, driver: Driver) -> None:
    fake.data(False)
    address = driver.reserve(4 * GRANULE)
    handle = driver.map(address, GRANULE)
    assert fake.live().bytes == GRANULE
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert fake.cu.cuMemUnmap(address, GRANULE) != SUCCESS
    assert fake.cu.cuMemRelease(handle) == SUCCESS
    assert fake.live().bytes == 0


def test_reset_is_a_fresh_start(fake: FakeCuda, driver: Driver) -> None:
    address = driver.reserve(GRANULE)
    driver.map(address, GRANULE)
    driver.event(driver.stream())
    fake.work(0, 1)
    fake.fail("cuInit")
    assert fake.traps() != []
    fake.reset(devices=1, total_bytes=8 * GRANULE)
    assert fake.live() == Live()
    assert fake.traps() == []
    assert fake.calls("cuInit") == 0
    driver.start()
    assert driver.free_and_total() == (8 * GRANULE, 8 * GRANULE)
