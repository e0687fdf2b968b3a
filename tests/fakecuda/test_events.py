"""Streams and events wait for the work that a test holds in flight, and an unmap under it is caught."""

import threading

import pytest

from tests.fakecuda.api import NONE, Driver, access
from tests.fakecuda.control import (
    GRANULE,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    SUCCESS,
    FakeCuda,
)


@pytest.fixture
def address(driver: Driver) -> int:
    address = driver.reserve(4 * GRANULE)
    driver.map(address, GRANULE)
    driver.map(address + GRANULE, GRANULE)
    return address


def test_an_event_passes_when_the_work_before_it_ends(fake: FakeCuda, driver: Driver, address: int) -> None:
    stream = driver.stream()
    before = driver.event(stream)
    work = fake.work(address, GRANULE, stream)
    after = driver.event(stream)
    later = fake.work(address, GRANULE, stream)
    assert [fake.cu.cuEventQuery(event) for event in (before, after)] == [SUCCESS, NOT_READY]
    assert fake.cu.cuStreamQuery(stream) == NOT_READY
    work.end()
    assert fake.cu.cuEventQuery(after) == SUCCESS
    assert fake.cu.cuStreamQuery(stream) == NOT_READY
    later.end()
    assert fake.cu.cuStreamQuery(stream) == SUCCESS
    assert fake.traps() == []


def test_an_event_that_was_never_recorded_has_passed(fake: FakeCuda, driver: Driver) -> None:
    assert fake.cu.cuEventQuery(driver.event()) == SUCCESS


def test_synchronize_waits(fake: FakeCuda, driver: Driver, address: int) -> None:
    work = fake.work(address, GRANULE)
    event = driver.event(0)
    done: list[int] = []
    waiter = threading.Thread(target=lambda: done.append(fake.cu.cuEventSynchronize(event)))
    waiter.start()
    waiter.join(0.05)
    assert done == []
    work.end()
    waiter.join(30)
    assert done == [SUCCESS]
    assert fake.cu.cuStreamSynchronize(0) == fake.cu.cuCtxSynchronize() == SUCCESS


def test_a_stream_waits_for_an_event_of_another(fake: FakeCuda, driver: Driver, address: int) -> None:
    first, second = driver.stream(flags=1), driver.stream(flags=1)
    with fake.work(address, GRANULE, first):
        assert fake.cu.cuStreamQuery(second) == SUCCESS
        assert fake.cu.cuStreamWaitEvent(second, driver.event(first), 0) == SUCCESS
        assert fake.cu.cuStreamQuery(second) == NOT_READY
    assert fake.cu.cuStreamQuery(second) == SUCCESS


def test_the_default_stream_and_blocking_streams_wait_for_each_other(
    fake: FakeCuda, driver: Driver, address: int
) -> None:
    blocking, free = driver.stream(), driver.stream(flags=1)
    with fake.work(address, GRANULE, blocking):
        assert fake.cu.cuEventQuery(driver.event(0)) == NOT_READY
        assert fake.cu.cuEventQuery(driver.event(free)) == SUCCESS
    with fake.work(address, GRANULE, free):
        assert fake.cu.cuEventQuery(driver.event(0)) == SUCCESS
    with fake.work(address, GRANULE):
        assert fake.cu.cuEventQuery(driver.event(blocking)) == NOT_READY
        assert fake.cu.cuEventQuery(driver.event(free)) == SUCCESS


def test_a_destroyed_stream_still_has_its_work(fake: FakeCuda, driver: Driver, address: int) -> None:
    stream = driver.stream()
    work = fake.work(address, GRANULE, stream)
    event = driver.event(stream)
    assert fake.cu.cuStreamDestroy_v2(stream) == SUCCESS
    assert fake.cu.cuStreamQuery(stream) == INVALID_HANDLE
    assert fake.cu.cuEventQuery(event) == fake.cu.cuStreamQuery(0) == NOT_READY
    work.end()
    assert fake.cu.cuEventQuery(event) == fake.cu.cuStreamQuery(0) == SUCCESS
    assert fake.live().streams == 0


def test_an_unmap_under_work_is_caught_and_loses_the_context(
    fake: FakeCuda, driver: Driver, address: int
) -> None:
    work = fake.work(address + GRANULE - 1, 2)
    event = driver.event(0)
    assert fake.cu.cuMemUnmap(address + GRANULE, GRANULE) == SUCCESS
    (trap,) = fake.traps()
    assert "unmapped" in trap
    assert f"{address + GRANULE:#x}" in trap
    assert fake.cu.cuEventQuery(event) == ILLEGAL_ADDRESS
    assert fake.cu.cuEventSynchronize(event) == ILLEGAL_ADDRESS
    assert fake.cu.cuCtxSynchronize() == ILLEGAL_ADDRESS
    work.end()
    assert fake.cu.cuStreamSynchronize(0) == ILLEGAL_ADDRESS  # for good
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS  # memory can still be given back


def test_an_unmap_beside_work_or_after_it_is_not(fake: FakeCuda, driver: Driver, address: int) -> None:
    with fake.work(address, GRANULE):
        assert fake.cu.cuMemUnmap(address + GRANULE, GRANULE) == SUCCESS
    assert fake.cu.cuMemUnmap(address, GRANULE) == SUCCESS
    assert fake.traps() == []
    assert fake.cu.cuCtxSynchronize() == SUCCESS


def test_a_refused_unmap_is_not_caught(fake: FakeCuda, driver: Driver, address: int) -> None:
    with fake.work(address, GRANULE):
        fake.fail("cuMemUnmap")
        assert fake.cu.cuMemUnmap(address, GRANULE) != SUCCESS
    assert fake.traps() == []


def test_access_taken_away_under_work_is_caught(fake: FakeCuda, driver: Driver, address: int) -> None:
    with fake.work(address, GRANULE):
        assert fake.cu.cuMemSetAccess(address, GRANULE, access(0, flags=NONE), 1) == SUCCESS
    assert len(fake.traps()) == 1


@pytest.mark.parametrize("granule", [1, 2])
def test_work_on_an_address_without_memory_is_caught(
    fake: FakeCuda, driver: Driver, address: int, granule: int
) -> None:
    with fake.work(address + granule * GRANULE, GRANULE + 1):
        assert len(fake.traps()) == 1


def test_handles_that_are_none(fake: FakeCuda, driver: Driver) -> None:
    event, stream = driver.event(), driver.stream()
    assert fake.cu.cuEventDestroy_v2(event) == SUCCESS
    assert fake.cu.cuStreamDestroy_v2(stream) == SUCCESS
    assert fake.cu.cuEventDestroy_v2(event) == INVALID_HANDLE
    assert fake.cu.cuEventQuery(event) == INVALID_HANDLE
    assert fake.cu.cuEventRecord(event, 0) == INVALID_HANDLE
    assert fake.cu.cuStreamWaitEvent(0, event, 0) == INVALID_HANDLE
    assert fake.cu.cuEventRecord(driver.event(), stream) == INVALID_HANDLE
    assert fake.cu.cuStreamDestroy_v2(stream) == INVALID_HANDLE
    assert fake.cu.cuStreamDestroy_v2(0) == INVALID_HANDLE
    assert fake.cu.cuEventCreate(None, 0) == INVALID_VALUE


def test_an_event_records_streams_of_its_own_context_only(fake: FakeCuda, driver: Driver) -> None:
    event = driver.event()
    assert fake.cu.cuCtxSetCurrent(driver.retain(1)) == SUCCESS
    assert fake.cu.cuEventRecord(event, 0) == INVALID_HANDLE
    assert fake.cu.cuEventRecord(event, driver.stream()) == INVALID_HANDLE
    assert fake.cu.cuEventQuery(event) == SUCCESS  # asking needs no context


def test_events_and_streams_end_with_their_context(fake: FakeCuda, driver: Driver) -> None:
    event = driver.event(driver.stream())
    assert fake.cu.cuDevicePrimaryCtxRelease_v2(0) == SUCCESS
    assert fake.cu.cuEventQuery(event) == INVALID_HANDLE
    assert (fake.live().events, fake.live().streams) == (0, 0)
