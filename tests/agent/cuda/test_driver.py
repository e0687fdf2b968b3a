"""CUDA's calls in CuPy's shapes: what they return, and CuPy's own error where they fail."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
from kvquota.agent.cuda import driver

from tests.fakecuda.control import INVALID_VALUE, NOT_READY, FakeCuda, Live
from tests.native.arenas import GRANULE

HERE = driver.MemLocation(driver.CU_MEM_LOCATION_TYPE_DEVICE, 0)
PROP = driver.MemAllocationProp(type=driver.CU_MEM_ALLOCATION_TYPE_PINNED, location=HERE)
ACCESS = driver.MemAccessDesc(HERE, driver.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)


@pytest.fixture
def started(fake: FakeCuda) -> Iterator[FakeCuda]:
    """With the primary context of device 0 current."""
    driver.init()
    driver.cupy_driver().ctxSetCurrent(driver.devicePrimaryCtxRetain(driver.deviceGet(0)))
    yield fake
    driver.cupy_driver().ctxSetCurrent(0)
    driver.cupy_driver().devicePrimaryCtxRelease(0)
    assert fake.live() == Live()


def test_memory_is_taken_mapped_and_given_back(started: FakeCuda) -> None:
    least = driver.memGetAllocationGranularity(PROP, driver.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
    assert least == GRANULE
    free, total = driver.memGetInfo()
    assert free == total
    address = driver.memAddressReserve(4 * GRANULE, alignment=8 * GRANULE)
    assert address % (8 * GRANULE) == 0
    handle = driver.memCreate(GRANULE, PROP)
    driver.memMap(address + GRANULE, GRANULE, 0, handle)
    driver.memSetAccess(address + GRANULE, GRANULE, [ACCESS])
    assert driver.memGetInfo() == (total - GRANULE, total)
    ctypes.memset(address + GRANULE, 1, GRANULE)
    driver.memUnmap(address + GRANULE, GRANULE)
    driver.memRelease(handle)
    driver.memAddressFree(address, 4 * GRANULE)
    assert driver.memGetInfo() == (total, total)


def test_events_pass_behind_work_and_streams_wait_for_them(started: FakeCuda) -> None:
    address = driver.memAddressReserve(GRANULE)
    handle = driver.memCreate(GRANULE, PROP)
    driver.memMap(address, GRANULE, 0, handle)
    driver.memSetAccess(address, GRANULE, [ACCESS])
    first, second = (driver.eventCreate(driver.CU_EVENT_DISABLE_TIMING) for _ in range(2))
    stream = ctypes.c_void_p()
    assert started.cu.cuStreamCreate(ctypes.byref(stream), 1) == 0
    with started.work(address, GRANULE):
        driver.eventRecord(first)
        driver.streamWaitEvent(stream.value or 0, first)
        driver.eventRecord(second, stream.value or 0)
        assert (driver.eventQuery(first), driver.eventQuery(second)) == (NOT_READY, NOT_READY)
    driver.eventSynchronize(second)
    assert (driver.eventQuery(first), driver.eventQuery(second)) == (0, 0)
    for event in first, second:
        driver.eventDestroy(event)
    assert started.cu.cuStreamDestroy_v2(stream) == 0
    driver.memUnmap(address, GRANULE)
    driver.memRelease(handle)
    driver.memAddressFree(address, GRANULE)


@pytest.mark.parametrize(
    "call",
    [
        lambda: driver.memAddressReserve(1),
        lambda: driver.memAddressFree(GRANULE, GRANULE),
        lambda: driver.memCreate(1, PROP),
        lambda: driver.memCreate(GRANULE, driver.MemAllocationProp()),
        lambda: driver.memRelease(77),
        lambda: driver.memMap(GRANULE, GRANULE, 0, 77),
        lambda: driver.memUnmap(GRANULE, GRANULE),
        lambda: driver.memSetAccess(GRANULE, GRANULE, [ACCESS]),
        lambda: driver.memGetAllocationGranularity(PROP, 9),
        lambda: driver.deviceGetAttribute(0, 0),
        lambda: driver.eventCreate(1 << 20),
    ],
)
def test_a_failed_call_raises_cupys_own_error(started: FakeCuda, call: Callable[[], object]) -> None:
    with pytest.raises(driver.cupy_driver().CUDADriverError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        call()
    assert caught.value.status == INVALID_VALUE


@pytest.mark.parametrize("call", [lambda: driver.deviceGet(2), lambda: driver.devicePrimaryCtxRetain(2)])
def test_a_device_that_is_not_there_is_cudas_to_refuse(started: FakeCuda, call: Callable[[], object]) -> None:
    with pytest.raises(driver.cupy_driver().CUDADriverError, match="CUDA_ERROR_INVALID_DEVICE"):
        call()


def test_before_init_nothing_is_known(fake: FakeCuda) -> None:
    with pytest.raises(driver.cupy_driver().CUDADriverError, match="CUDA_ERROR_NOT_INITIALIZED"):
        driver.deviceGetCount()
    driver.init()
    assert driver.deviceGetCount() == 2
    assert driver.deviceGetName(1) == "Stand-in GPU"
    assert len(driver.deviceGetUuid(1)) == 16
