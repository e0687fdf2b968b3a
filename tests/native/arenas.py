"""What the native tests share: small arenas on real memory, and waiting for their worker without sleeping."""

import os
import select
import time
from collections.abc import Callable

from kvquota.native import Arena, ArenaReport, Driver, HostDriver

GRANULE = 2 << 20
TIMEOUT = 30.0


def wait_for(arena: Arena, condition: Callable[[ArenaReport], bool]) -> ArenaReport:
    """The first report that fulfils `condition`, woken by the arena's eventfd."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        report = arena.report()
        if condition(report):
            return report
        left = deadline - time.monotonic()
        ready, _, _ = select.select([arena], [], [], max(0.0, left))
        assert ready, f"the arena did not get there: done {report.done}, created {report.created}"
        os.eventfd_read(arena.fileno())


def done(arena: Arena, seq: int) -> ArenaReport:
    return wait_for(arena, lambda report: report.done >= seq)


def ask(arena: Arena, asked: int, dropped: int = 0) -> None:
    """Ask, and wait until the credits are there."""
    arena.ask(asked, dropped)
    assert arena.wait_credits(asked, TIMEOUT) == asked


def taken(driver: HostDriver) -> int:
    """Bytes of real memory behind the driver's granules."""
    return os.fstat(driver.fileno()).st_blocks * 512


def two_tensors(driver: Driver, pages: int = 16) -> Arena:
    return Arena(driver, [GRANULE, 2 * GRANULE], pages)
