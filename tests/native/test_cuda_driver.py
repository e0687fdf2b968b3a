"""What is CudaDriver's own, beside the contract in test_driver_table.py: contexts, fences and forks."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from kvquota.agent.cuda import driver as cuda
from kvquota.agent.cuda import open_driver
from kvquota.native import Arena, ArenaInUseError, CudaDriver, DriverError

from tests.fakecuda.control import FakeCuda, Live, load
from tests.native import capsule
from tests.native.arenas import GRANULE, TIMEOUT, ask, done, two_tensors

NON_BLOCKING = 1
DL_CUDA = 2
BFLOAT = 4


@pytest.fixture
def fake() -> FakeCuda:
    fake = load()
    fake.reset(devices=2, total_bytes=1 << 30)
    return fake


@pytest.fixture
def driver(fake: FakeCuda) -> CudaDriver:
    return open_driver(0)


@pytest.fixture
def arena(driver: CudaDriver) -> Iterator[Arena]:
    arena = two_tensors(driver)
    yield arena
    arena.close()


@pytest.fixture
def current(fake: FakeCuda, driver: CudaDriver) -> Iterator[int]:
    """The driver's context, current on this thread as an engine's is."""
    context = cuda.devicePrimaryCtxRetain(0)
    cuda.cupy_driver().ctxSetCurrent(context)
    yield context
    cuda.cupy_driver().ctxSetCurrent(0)
    cuda.cupy_driver().devicePrimaryCtxRelease(0)


def stream(fake: FakeCuda, flags: int = NON_BLOCKING) -> int:
    created = ctypes.c_void_p()
    assert fake.cu.cuStreamCreate(ctypes.byref(created), flags) == 0
    return created.value or 0


def in_thread(call: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT)
    assert (thread.is_alive(), failed) == (False, [])


def use(driver: CudaDriver) -> None:
    """Calls that need a context, and calls that need none."""
    handle = driver.mem_create(GRANULE)
    driver.mem_get_info()
    driver.event_destroy(driver.event_record())
    driver.mem_release(handle)


def test_a_thread_without_a_context_is_left_without(driver: CudaDriver) -> None:
    def call() -> None:
        use(driver)
        assert cuda.cupy_driver().ctxGetCurrent() == 0

    in_thread(call)


def test_a_thread_with_another_context_keeps_it(driver: CudaDriver) -> None:
    def call() -> None:
        other = cuda.cupy_driver().ctxCreate(1)
        use(driver)
        assert cuda.cupy_driver().ctxGetCurrent() == other
        cuda.cupy_driver().ctxDestroy(other)

    in_thread(call)


def test_a_context_that_can_not_come_back_leaves_none(driver: CudaDriver, fake: FakeCuda) -> None:
    def call() -> None:
        other = cuda.cupy_driver().ctxCreate(1)
        fake.fail("cuCtxSetCurrent", nth=2)
        driver.mem_get_info()
        assert cuda.cupy_driver().ctxGetCurrent() == 0
        cuda.cupy_driver().ctxDestroy(other)

    in_thread(call)


def test_with_its_context_current_nothing_is_switched(
    driver: CudaDriver, fake: FakeCuda, current: int
) -> None:
    before = fake.calls("cuCtxSetCurrent")
    use(driver)
    assert (fake.calls("cuCtxSetCurrent"), cuda.cupy_driver().ctxGetCurrent()) == (before, current)


def test_contents_stay_with_the_handle(driver: CudaDriver) -> None:
    address, handle = driver.address_reserve(2 * GRANULE), driver.mem_create(GRANULE)
    for place in address, address + GRANULE:
        driver.mem_map(place, GRANULE, handle)
        driver.mem_set_access(place, GRANULE)
        if place == address:
            ctypes.memset(place, 7, GRANULE)
        else:
            assert ctypes.string_at(place, GRANULE) == b"\x07" * GRANULE
        driver.mem_unmap(place, GRANULE)
    driver.mem_release(handle)
    driver.address_free(address, 2 * GRANULE)


def test_a_page_goes_when_the_streams_work_is_done(
    arena: Arena, driver: CudaDriver, fake: FakeCuda, current: int
) -> None:
    driver.stream = stream(fake)
    ask(arena, 1)
    arena.apply(1, [3], [])
    work = fake.work(arena.base + 3 * GRANULE, 100, driver.stream)
    arena.apply(2, [], [3])
    # The worker waits for the fence: what is asked for now comes after it.
    arena.ask(2, 0)
    assert arena.wait_credits(2, 0.05) == 1
    assert (arena.report().unmapped, fake.live().handles, fake.traps()) == (0, 2, [])
    work.end()
    assert done(arena, 2).unmapped == 1
    assert arena.wait_credits(2, TIMEOUT) == 2
    assert fake.traps() == []
    assert fake.calls("cuCtxSynchronize") == 0


def test_work_of_another_stream_is_not_waited_for(
    arena: Arena, driver: CudaDriver, fake: FakeCuda, current: int
) -> None:
    driver.stream = stream(fake)
    ask(arena, 1)
    arena.apply(1, [3], [])
    with fake.work(arena.base + 3 * GRANULE, 100, stream(fake)):
        arena.apply(2, [], [3])
        assert done(arena, 2).unmapped == 1
    [trap] = fake.traps()
    assert trap.startswith("unmapped: ")


def test_without_a_stream_fences_stand_behind_blocking_streams(
    arena: Arena, driver: CudaDriver, fake: FakeCuda, current: int
) -> None:
    assert driver.stream == 0
    ask(arena, 1)
    arena.apply(1, [0], [])
    with fake.work(arena.base, 1, stream(fake, flags=0)):
        event = driver.event_record()
        assert not driver.event_query(event)
    driver.event_synchronize(event)
    assert driver.event_query(event)
    driver.event_destroy(event)


def test_events_are_used_again(driver: CudaDriver, fake: FakeCuda) -> None:
    first, second = driver.event_record(), driver.event_record()
    driver.event_destroy(first)
    assert driver.event_record() == first
    assert (fake.calls("cuEventCreate"), fake.live().events) == (2, 2)
    driver.event_destroy(second)
    with pytest.raises(DriverError, match="event_destroy failed with CUDA_ERROR_INVALID_HANDLE"):
        driver.event_destroy(second)
    fake.fail("cuEventRecord")
    with pytest.raises(DriverError, match=r"event_record failed with CUDA_ERROR_UNKNOWN .*stream 0"):
        driver.event_record()
    assert driver.event_record() == second
    assert fake.live().events == 2


def test_a_forked_child_is_told_that_cuda_is_not_its_own(driver: CudaDriver, arena: Arena) -> None:
    ask(arena, 1)
    arena.apply(1, [0], [])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            driver.mem_create(GRANULE)
        except DriverError as error:
            code = 0 if error.name == "CUDA_ERROR_NOT_INITIALIZED" else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.apply(2, [], [0])
    assert done(arena, 2).unmapped == 1


def test_a_tensor_says_which_gpu_it_is_on(fake: FakeCuda) -> None:
    arena = two_tensors(open_driver(1))
    held = arena.dlpack(arena.offsets[1], [2, 3, 8], BFLOAT, 16, [4096, 8, 1])
    tensor = capsule.read(held)
    assert (tensor.device_type, tensor.device_id) == (DL_CUDA, 1)
    assert tensor.data == arena.base + arena.offsets[1]
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (BFLOAT, 16, 1, 0)
    assert (tensor.shape[: tensor.ndim], tensor.strides[: tensor.ndim]) == ([2, 3, 8], [4096, 8, 1])
    with pytest.raises(ArenaInUseError, match="1 tensors over the arena are alive"):
        arena.close()
    del held
    arena.close()


def test_an_arena_gives_everything_back(fake: FakeCuda) -> None:
    driver = open_driver(1)
    arena = two_tensors(driver)
    ask(arena, 3)
    arena.apply(1, [0, 1], [])
    arena.apply(2, [], [1])
    arena.close()
    del arena, driver
    assert (fake.live(), fake.traps()) == (Live(), [])
