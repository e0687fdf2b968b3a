"""Which context a thread has, and what is refused without one."""

import ctypes
import threading
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

from tests.fakecuda.api import Driver
from tests.fakecuda.control import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    SUCCESS,
    FakeCuda,
)


def current(fake: FakeCuda) -> int | None:
    context = c_void_p()
    assert fake.cu.cuCtxGetCurrent(byref(context)) == SUCCESS
    return context.value


def active(fake: FakeCuda, device: int) -> bool:
    flags, state = c_uint(), c_int()
    assert fake.cu.cuDevicePrimaryCtxGetState(device, byref(flags), byref(state)) == SUCCESS
    return bool(state.value)


def test_nothing_works_before_it_is_initialised(fake: FakeCuda) -> None:
    assert fake.cu.cuDeviceGetCount(byref(c_int())) == NOT_INITIALIZED
    assert fake.cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0) == NOT_INITIALIZED
    assert fake.cu.cuCtxGetCurrent(byref(c_void_p())) == NOT_INITIALIZED
    assert fake.cu.cuMemUnmap(0, 0) == NOT_INITIALIZED
    assert fake.cu.cuDriverGetVersion(byref(c_int())) == SUCCESS  # asks no device
    assert fake.cu.cuInit(1) == INVALID_VALUE
    assert fake.cu.cuInit(0) == SUCCESS
    assert fake.cu.cuInit(0) == SUCCESS


def test_without_a_context(fake: FakeCuda) -> None:
    assert fake.cu.cuInit(0) == SUCCESS
    assert current(fake) is None
    assert fake.cu.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t())) == INVALID_CONTEXT
    assert fake.cu.cuEventCreate(byref(c_void_p()), 0) == INVALID_CONTEXT
    assert fake.cu.cuStreamCreate(byref(c_void_p()), 0) == INVALID_CONTEXT
    assert fake.cu.cuStreamSynchronize(0) == INVALID_CONTEXT
    assert fake.cu.cuCtxSynchronize() == INVALID_CONTEXT
    assert fake.cu.cuCtxGetDevice(byref(c_int())) == INVALID_CONTEXT
    assert fake.cu.cuCtxPopCurrent_v2(byref(c_void_p())) == INVALID_CONTEXT
    assert fake.cu.cuMemsetD8_v2(0, 0, 1) == INVALID_CONTEXT


def test_the_primary_context_is_one_and_counted(fake: FakeCuda) -> None:
    driver = Driver(fake.cu)
    assert fake.cu.cuInit(0) == SUCCESS
    assert not active(fake, 1)
    first = driver.retain(1)
    assert driver.retain(1) == first
    assert current(fake) is None  # retained is not current
    assert fake.cu.cuDevicePrimaryCtxRelease_v2(1) == SUCCESS
    assert active(fake, 1)
    assert fake.live().contexts == 1
    assert fake.cu.cuDevicePrimaryCtxRelease_v2(1) == SUCCESS
    assert not active(fake, 1)
    assert fake.live().contexts == 0
    assert fake.cu.cuDevicePrimaryCtxRelease_v2(1) == INVALID_CONTEXT
    assert fake.cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 2) == INVALID_DEVICE


def test_a_thread_keeps_a_stack_of_its_own(fake: FakeCuda, driver: Driver) -> None:
    first, second = current(fake), driver.retain(1)
    assert fake.cu.cuCtxPushCurrent_v2(second) == SUCCESS
    device = c_int(-1)
    assert fake.cu.cuCtxGetDevice(byref(device)) == SUCCESS
    assert device.value == 1
    seen: list[int | None] = []
    other = threading.Thread(target=lambda: seen.append(current(fake)))
    other.start()
    other.join(30)
    assert seen == [None]
    popped = c_void_p()
    assert fake.cu.cuCtxPopCurrent_v2(byref(popped)) == SUCCESS
    assert popped.value == second
    assert current(fake) == first
    assert fake.cu.cuCtxSetCurrent(second) == SUCCESS  # replaces the top
    assert fake.cu.cuCtxSetCurrent(None) == SUCCESS  # pops it
    assert current(fake) is None
    assert fake.cu.cuCtxSetCurrent(None) == SUCCESS


def test_a_destroyed_context(fake: FakeCuda, driver: Driver) -> None:
    context = c_void_p()
    assert fake.cu.cuCtxCreate_v2(byref(context), 0, 1) == SUCCESS
    assert current(fake) == context.value
    seen: list[int] = []
    ready, go = threading.Event(), threading.Event()

    def use() -> None:
        fake.cu.cuCtxSetCurrent(context)
        ready.set()
        go.wait(30)
        seen.append(fake.cu.cuCtxSynchronize())

    other = threading.Thread(target=use)
    other.start()
    assert ready.wait(30)
    assert fake.cu.cuCtxDestroy_v2(context) == SUCCESS
    go.set()
    other.join(30)
    assert seen == [CONTEXT_IS_DESTROYED]
    assert current(fake) == driver.retain(0)  # popped from this thread
    assert fake.cu.cuCtxDestroy_v2(context) == INVALID_CONTEXT
    assert fake.cu.cuCtxSetCurrent(context) == INVALID_CONTEXT
    assert fake.cu.cuCtxDestroy_v2(driver.retain(0)) == INVALID_CONTEXT  # the primary one is released instead


def test_the_primary_context_released_while_current(fake: FakeCuda, driver: Driver) -> None:
    assert fake.cu.cuDevicePrimaryCtxRelease_v2(0) == SUCCESS
    assert fake.cu.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t())) == CONTEXT_IS_DESTROYED
    driver.retain(0)
    assert driver.free_and_total() == (64 << 20, 64 << 20)  # the same context, active again


def test_a_stream_knows_its_context(fake: FakeCuda, driver: Driver) -> None:
    stream, context = driver.stream(), current(fake)
    assert fake.cu.cuCtxSetCurrent(driver.retain(1)) == SUCCESS
    found = ctypes.c_void_p()
    assert fake.cu.cuStreamGetCtx(stream, byref(found)) == SUCCESS
    assert found.value == context
