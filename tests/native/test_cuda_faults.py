"""Every CUDA call that an arena's life makes, failing at every position of start, map, unmap and stop."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from kvquota.agent.cuda import CudaUnavailableError, driver, library, open_driver
from kvquota.native import DriverError

from tests.fakecuda.control import OUT_OF_MEMORY, UNKNOWN, FakeCuda, Live, load
from tests.native.arenas import ask, two_tensors, wait_for
from tests.native.life import TRIES, Life

NAMES = [
    "cuGetProcAddress",
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy",
]


def live(fake: FakeCuda) -> bool:
    """Open a driver, and let an arena live on it. Returns whether it could start."""
    library.address.cache_clear()
    try:
        arena = two_tensors(open_driver(0), 4)
    except (CudaUnavailableError, driver.cupy_driver().CUDADriverError, DriverError):
        return False
    Life(arena, lambda: fake.live().bytes).live()
    return True


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = load()
    # The books alone: what pages hold is not looked at.
    fake.data(False)
    yield fake
    fake.data(True)


def calls_of_a_life(fake: FakeCuda) -> dict[str, int]:
    fake.reset(total_bytes=1 << 30)
    assert live(fake)
    assert (fake.live(), fake.traps()) == (Live(), [])
    return {name: fake.calls(name) for name in NAMES}


def test_every_call_is_among_them(fake: FakeCuda) -> None:
    calls = calls_of_a_life(fake)
    assert 0 not in calls.values()
    others = set(library.addresses()) - set(NAMES)
    assert {name for name in others if fake.calls(name)} == set()


@pytest.mark.parametrize(
    ("name", "code"), [*((name, UNKNOWN) for name in NAMES), ("cuMemCreate", OUT_OF_MEMORY)]
)
def test_whatever_fails_nothing_is_lost(fake: FakeCuda, name: str, code: int) -> None:
    positions = calls_of_a_life(fake)[name]
    for times in (1, TRIES):
        for nth in range(1, positions + 1):
            fake.reset(total_bytes=1 << 30)
            fake.fail(name, nth, times, code)
            started = live(fake)
            assert fake.calls(name) >= nth
            left = fake.live()
            if (name, times) == ("cuDevicePrimaryCtxRelease", TRIES):
                # Told on stderr: nothing comes after it that could try again.
                left = replace(left, contexts=0, events=0)
            assert (left, fake.traps(), started, nth) == (Live(), [], started, nth)


def recycle(fake: FakeCuda, name: str, nth: int = 0, times: int = 0) -> int:
    """Unmap three pages behind work in flight, while two credits are pending. Returns the calls of `name`."""
    fake.reset(total_bytes=1 << 30)
    arena = two_tensors(open_driver(0), 8)
    context = driver.devicePrimaryCtxRetain(0)
    driver.cupy_driver().ctxSetCurrent(context)
    ask(arena, 3)
    arena.apply(1, [0, 1, 3], [])
    before = fake.calls(name)
    if nth:
        fake.fail(name, nth, times)
    with fake.work(arena.base, 0):
        arena.apply(2, [], [0, 1, 3])
        arena.ask(5, 0)
    report = wait_for(arena, lambda now: now.done == 2 and now.created + now.refused == 5)
    if not nth:
        # What was created for the three pages serves the two credits, and one goes back.
        assert (report.created, report.unmapped, fake.calls("cuMemCreate")) == (5, 3, 6)
        assert fake.calls("cuMemRelease") == 2
    if not report.faults:
        assert report.held_bytes == fake.live().bytes
    driver.cupy_driver().ctxSetCurrent(0)
    for _ in range(3):
        with suppress(DriverError):
            arena.close()
    driver.cupy_driver().devicePrimaryCtxRelease(0)
    calls = fake.calls(name) - before
    left = fake.live()
    assert (left.mappings, left.handles, left.reservations, left.bytes) == (0, 0, 0, 0)
    assert fake.traps() == []
    return calls


@pytest.mark.parametrize(
    "name",
    ["cuMemRelease", "cuMemUnmap", "cuEventCreate", "cuEventRecord", "cuEventSynchronize"],
)
def test_whatever_fails_while_memory_is_recycled_nothing_is_lost(fake: FakeCuda, name: str) -> None:
    positions = recycle(fake, name)
    assert positions > 0
    for times in (1, TRIES):
        for nth in range(1, positions + 1):
            assert recycle(fake, name, nth, times) >= nth
