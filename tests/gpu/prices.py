"""What the driver's calls cost for a granule, and how fast an arena gives memory back."""

import os
import select
import time
from collections.abc import Callable, Iterator

from kvquota.native import Arena, Driver

MIB = 1 << 20
SIZES = [2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB]
MEMORY = 256 * MIB
TIMEOUT = 60.0


class Granules:
    """Memory of so many bytes, in granules of one size."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.size = size
        self.count = MEMORY // size
        self._driver = driver
        self._base = driver.address_reserve(MEMORY)
        self._places = range(self._base, self._base + MEMORY, size)
        self._handles: list[int] = []

    def create(self) -> None:
        self._handles = [self._driver.mem_create(self.size) for _ in self._places]

    def map(self) -> None:
        for place, handle in zip(self._places, self._handles, strict=True):
            self._driver.mem_map(place, self.size, handle)

    def access(self) -> None:
        for place in self._places:
            self._driver.mem_set_access(place, self.size)

    def unmap(self) -> None:
        for place in self._places:
            self._driver.mem_unmap(place, self.size)

    def access_run(self) -> None:
        self._driver.mem_set_access(self._base, MEMORY)

    def unmap_run(self) -> None:
        self._driver.mem_unmap(self._base, MEMORY)

    def release(self) -> None:
        for handle in self._handles:
            self._driver.mem_release(handle)

    def close(self) -> None:
        self._driver.address_free(self._base, MEMORY)


def calls(driver: Driver) -> Iterator[tuple[str, str]]:
    """Microseconds for a granule, one by one and all in one call, for each size."""
    for size in SIZES:
        granules = Granules(driver, size)

        def price(step: Callable[[], None], count: int = granules.count) -> str:
            start = time.perf_counter()
            step()
            return f"{step.__name__.removesuffix('_run')} {(time.perf_counter() - start) / count * 1e6:.1f}"

        one = [price(step) for step in (granules.create, granules.map, granules.access, granules.unmap)]
        granules.map()
        run = [price(step) for step in (granules.access_run, granules.unmap_run)]
        one.append(price(granules.release))
        granules.close()
        yield f"us for {size // MIB} MiB, one by one", ", ".join(one)
        yield f"us for {size // MIB} MiB, {granules.count} in one call", ", ".join(run)


def reclaim(driver: Driver) -> tuple[str, str]:
    """GiB a second, from the command until the driver has the memory."""
    tensors = 8
    granule = driver.granularity
    pages = range(MEMORY // tensors // granule)
    arena = Arena(driver, [granule] * tensors, len(pages))
    arena.ask(len(pages), 0)
    created = arena.wait_credits(len(pages), TIMEOUT)
    arena.apply(1, pages[:created], [])
    start = time.perf_counter()
    arena.apply(2, [], pages[:created])
    while arena.report().done < 2:
        ready, _, _ = select.select([arena], [], [], TIMEOUT)
        if not ready:
            raise TimeoutError(f"the arena did not unmap {created} pages in {TIMEOUT} s")
        os.eventfd_read(arena.fileno())
    seconds = time.perf_counter() - start
    gone = arena.report().unmapped * arena.page_bytes / (1 << 30)
    arena.close()
    return "reclaim of neighbouring pages", f"{gone / seconds:.1f} GiB/s"
