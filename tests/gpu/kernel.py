"""Torch's kernels over pages that come and go behind their fence: `python -m tests.gpu.kernel --seconds 10`.

A page is written by kernels right before it is unmapped; those that stay must hold what was written last.
"""

import argparse
import random
import sys
import time

import torch
from kvquota.agent.cuda import open_driver
from kvquota.native import Arena, Driver
from torch.utils.dlpack import from_dlpack

PAGES = 64
AT_ONCE = 8
TIMEOUT = 60.0
NO_TORCH = 77
_FLOAT = 2


def run(driver: Driver, seconds: float) -> str:
    """What was done. Raises AssertionError where a page holds something else, and what CUDA raises."""
    arena = Arena(driver, [2 * driver.granularity], PAGES)
    floats = arena.page_bytes // 4
    pages = from_dlpack(arena.dlpack(0, [PAGES, floats], _FLOAT, 32))
    chosen = random.Random(4)
    held: dict[int, float] = {}
    left: dict[int, int] = {}
    end = time.monotonic() + seconds
    seq = asked = 0
    while time.monotonic() < end or held:
        last = time.monotonic() >= end
        going = [page for page in held if last or chosen.random() < 0.5]
        done = arena.report().done
        free = [page for page in range(PAGES) if page not in held and left.get(page, 0) <= done]
        coming = [] if last else chosen.sample(free, min(AT_ONCE, len(free)))
        asked += len(coming)
        arena.ask(asked, 0)
        if arena.wait_credits(asked, TIMEOUT) != asked:
            raise RuntimeError(f"no memory for {len(coming)} pages of {arena.page_bytes} bytes")
        seq += 1
        for page in going:
            if not bool((pages[page] == held.pop(page)).all()):
                raise AssertionError(f"page {page} does not hold what was written to it")
            left[page] = seq
            # Still under way when the page is to go.
            pages[page].fill_(-1.0)
        arena.apply(seq, coming, going)
        for page in coming:
            held[page] = float(seq)
            pages[page].fill_(held[page])
    mapped = arena.report().mapped
    del pages
    arena.close()
    return f"{mapped} pages in {seq} commands"


def main() -> int:
    """77 where there is no torch with CUDA."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kernel", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    seconds = parser.parse_args().seconds
    if not torch.cuda.is_available():
        print("no torch with CUDA here")
        return NO_TORCH
    driver = open_driver(0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    driver.stream = stream.cuda_stream
    with torch.cuda.stream(stream):
        print(run(driver, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
