"""How fast an arena gives memory back, against the bare system calls on as many granules in the same run.

Turn by turn, so that whatever else the machine does falls on both. Exits 1 where a bound is missed.
"""

import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Sequence

from kvquota.native import Arena, HostDriver

from tests.native.arenas import ask, done

GRANULE = 2 << 20
TENSORS = 4
PAGES = 64
TURNS = 9
BOUND = 1.3

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def bare_mmap(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, fd, offset)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(mapped)


def bare(pages: Sequence[int]) -> float:
    """Seconds to unmap and punch the granules of `pages`, one after the other."""
    none = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    size = TENSORS * PAGES * GRANULE
    fd = os.memfd_create("bare")
    base = bare_mmap(None, size, 0, none, -1, 0)
    granules = [tensor * PAGES + page for tensor in range(TENSORS) for page in pages]
    shared = mmap.MAP_SHARED | _MAP_FIXED
    for granule in granules:
        os.posix_fallocate(fd, granule * GRANULE, GRANULE)
        address = base + granule * GRANULE
        bare_mmap(address, GRANULE, mmap.PROT_READ | mmap.PROT_WRITE, shared, fd, granule * GRANULE)
        ctypes.memset(address, 1, GRANULE)
    start = time.perf_counter()
    for granule in granules:
        bare_mmap(base + granule * GRANULE, GRANULE, 0, none | _MAP_FIXED, -1, 0)
        if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, granule * GRANULE, GRANULE) != 0:
            raise OSError(ctypes.get_errno(), "fallocate")
    seconds = time.perf_counter() - start
    assert os.fstat(fd).st_blocks == 0
    _libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(size))
    os.close(fd)
    return seconds


def elastic(pages: Sequence[int]) -> float:
    """Seconds from the command to the report that the pages are gone."""
    driver = HostDriver()
    arena = Arena(driver, [GRANULE] * TENSORS, PAGES)
    ask(arena, len(pages))
    arena.apply(1, pages, [])
    for tensor in range(TENSORS):
        for page in pages:
            ctypes.memset(arena.base + arena.offsets[tensor] + page * GRANULE, 1, GRANULE)
    os.eventfd_read(arena.fileno())
    start = time.perf_counter()
    arena.apply(2, [], pages)
    done(arena, 2)
    seconds = time.perf_counter() - start
    assert os.fstat(driver.fileno()).st_blocks == 0
    arena.close()
    return seconds


def main() -> int:
    """Print the table; 1 where a bound is missed."""
    missed = False
    print(f"{'figure':36}{'bare':>12}{'arena':>12}{'ratio':>8}{'bound':>8}  verdict")
    for name, pages in [("neighbouring pages", range(PAGES // 2)), ("scattered pages", range(0, PAGES, 2))]:
        turns = [(bare(pages), elastic(pages)) for _ in range(TURNS)]
        ratio = statistics.median(ours / theirs for theirs, ours in turns)
        mib = len(pages) * TENSORS * GRANULE >> 20
        theirs, ours = (f"{min(side) * 1000:.1f} ms" for side in zip(*turns, strict=True))
        verdict = "ok" if ratio <= BOUND else "MISSED"
        missed |= ratio > BOUND
        print(f"{f'{mib} MiB of {name}':36}{theirs:>12}{ours:>12}{ratio:>8.2f}{BOUND:>8.2f}  {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
