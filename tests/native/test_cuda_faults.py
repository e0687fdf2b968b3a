"""Every CUDA call that an arena's life makes, failing at every position of start, map, unmap and stop."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from kvquota.agent.cuda import CudaUnavailableError, driver, library, open_driver
from kvquota.native import Arena, ArenaReport, DriverError

from tests.fakecuda.control import OUT_OF_MEMORY, UNKNOWN, FakeCuda, Live, load
from tests.native.arenas import GRANULE, done, two_tensors, wait_for

PAGE = 3 * GRANULE
# As often as a call is tried at once.
TRIES = 3
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


class Life:
    """An arena on the stand-in that is started, mapped, unmapped and stopped, whatever fails meanwhile."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.seq = 0

    def live(self) -> bool:
        """Returns whether it could start."""
        library.address.cache_clear()
        try:
            arena = two_tensors(open_driver(0), 4)
        except (CudaUnavailableError, driver.cupy_driver().CUDADriverError, DriverError):
            return False
        self.grow(arena, 2)
        self.apply(arena, [0, 1], [])
        self.grow(arena, 3)
        self.apply(arena, [3], [1])
        self.drop(arena, 1)
        self.apply(arena, [], [3])
        # What did not go at once has gone later, and a page that could not be mapped can be used again.
        wait_for(arena, lambda report: report.unmapped == 2 and not report.quarantined_credits)
        self.check(arena.report())
        self.apply(arena, [1], [])
        self.stop(arena)
        return True

    def apply(self, arena: Arena, maps: list[int], unmaps: list[int]) -> None:
        self.seq += 1
        try:
            arena.apply(self.seq, maps, unmaps)
        except DriverError:
            assert {fault.page for fault in arena.report().faults} >= set(maps)
        self.check(done(arena, self.seq))

    def grow(self, arena: Arena, count: int) -> None:
        """Ask again for what was refused, until so many credits are held."""
        while True:
            report = arena.report()
            self.check(report)
            held = report.created - report.mapped - report.dropped
            if held >= count:
                return
            asked = report.created + report.refused + count - held
            arena.ask(asked, report.dropped)
            wait_for(arena, lambda report: report.created + report.refused == asked)  # noqa: B023

    def drop(self, arena: Arena, count: int) -> None:
        report = arena.report()
        dropped = report.dropped + count
        arena.ask(report.created + report.refused, dropped)
        self.check(wait_for(arena, lambda report: report.dropped == dropped))

    def check(self, report: ArenaReport) -> None:
        """The books agree with each other, and with what the device says."""
        pages = report.created - report.dropped - report.unmapped + report.quarantined_credits
        assert report.held_bytes == pages * PAGE
        taken = self.fake.live().bytes
        assert taken <= report.held_bytes
        if not report.faults:
            assert taken == report.held_bytes

    def stop(self, arena: Arena) -> None:
        try:
            arena.close()
        except DriverError:
            arena.close()


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = load()
    # The books alone: what pages hold is not looked at.
    fake.data(False)
    yield fake
    fake.data(True)


def calls_of_a_life(fake: FakeCuda) -> dict[str, int]:
    fake.reset(total_bytes=1 << 30)
    assert Life(fake).live()
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
            life = Life(fake)
            started = life.live()
            assert fake.calls(name) >= nth
            live = fake.live()
            if (name, times) == ("cuDevicePrimaryCtxRelease", TRIES):
                # Told on stderr: nothing comes after it that could try again.
                live = replace(live, contexts=0, events=0)
            assert (live, fake.traps(), started, nth) == (Live(), [], started, nth)
