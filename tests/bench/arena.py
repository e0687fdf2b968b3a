"""What pages cost an engine at an A100's prices, on the stand-in driver. Exits 1 where a bound is missed.

A model of 32 layers, K and V apart: 64 granules a page.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path
from threading import get_native_id

from kvquota.agent import Agent, Settings
from kvquota.agent.contract import PageCommand
from kvquota.agent.cuda import open_driver
from kvquota.agent.local_rank import LocalRank
from kvquota.native import Arena

from tests.bench.step import BLOCKS_PER_PAGE, PAGES, BenchAdapter
from tests.fakecuda.control import A100, FakeCuda, load

GRANULE = 2 << 20
TENSORS = 64
TIMEOUT = 60.0
CALLS = [*A100, "cuMemRelease", "cuEventRecord"]

Row = tuple[str, str, str, bool]


class GrowingAdapter(BenchAdapter):
    """One that asks for the pages that its requests will want next."""

    wants = 0

    def wanted(self) -> int:
        return self.wants


class Engine:
    """A leader and its only rank, stepped by hand, with no daemon and no limit."""

    def __init__(self, folder: Path, reserve: int) -> None:
        self.arena = Arena(open_driver(0), [GRANULE] * TENSORS, PAGES)
        self.rank = LocalRank(self.arena)
        self.adapter = GrowingAdapter()
        reserve_bytes = reserve * self.arena.page_bytes
        settings = Settings("bench", socket=folder / "agent.sock", reserve_bytes=reserve_bytes)
        self.agent = Agent(self.adapter, [self.rank], pages=PAGES, floor=0, settings=settings)

    def step(self) -> None:
        self.agent.begin_step()
        command: PageCommand | None = self.agent.end_step()
        if command is not None:
            self.rank.apply(command)

    def take_page(self) -> list[object]:
        """The blocks of a page, once there is a credit for it or the page is warm."""
        end = time.monotonic() + TIMEOUT
        while self.adapter.queue.num_free_blocks < BLOCKS_PER_PAGE:
            if time.monotonic() > end:
                raise RuntimeError(f"no credit within {TIMEOUT} s: {self.agent.statistics()}")
            self.step()
        return self.adapter.queue.popleft_n(BLOCKS_PER_PAGE)

    def close(self) -> None:
        self.agent.close()
        self.arena.close()


def calls(fake: FakeCuda, thread: int = 0) -> int:
    return sum(fake.calls(name, thread) for name in CALLS)


def begin(fake: FakeCuda) -> None:
    """A device with room for everything, whose calls cost nothing yet."""
    fake.reset(total_bytes=1 << 40)
    # 64,000 scattered granules are more mappings than the kernel lets a process have.
    fake.data(False)


def warm_page(fake: FakeCuda, folder: Path) -> Row:
    begin(fake)
    fake.prices(A100)
    engine = Engine(folder, reserve=2)
    blocks = engine.take_page()
    engine.step()
    # The worker makes the reserve whole again.
    engine.arena.wait_credits(3, TIMEOUT)
    before = calls(fake)
    for _ in range(100):
        engine.adapter.queue.prepend_n(blocks)
        engine.step()
        blocks = engine.take_page()
        engine.step()
    made = calls(fake) - before
    engine.close()
    return "a page given back and taken again: driver calls", f"{made}", "0", made == 0


def growth(fake: FakeCuda, folder: Path) -> Row:
    begin(fake)
    fake.prices(A100)
    engine = Engine(folder, reserve=2)
    pages = 50
    engine.adapter.wants = 2
    engine.take_page()
    start = time.monotonic()
    for page in range(1, pages):
        time.sleep(max(0.0, start + page / 50 - time.monotonic()))
        engine.take_page()
        engine.step()
    made = fake.calls("cuMemCreate")
    here = fake.calls("cuMemCreate", get_native_id())
    if made < pages * TENSORS:
        raise RuntimeError(f"{made} handles for {pages} pages of {TENSORS} granules")
    engine.close()
    return "50 pages a second: handles made by the engine thread", f"{here} of {made}", "0", here == 0


def neighbours(fake: FakeCuda) -> Row:
    """What the driver charges for the arena's calls, and the thread's time beside them.

    The latter with calls that cost nothing, of the best turn: neither has what else the machine does in it.
    """
    pages, turns = 64, 9
    begin(fake)
    arena = Arena(open_driver(0), [GRANULE] * TENSORS, 2 * pages)
    map_us, (run_us, granule_us) = sum(A100["cuMemMap"]), A100["cuMemSetAccess"]
    least = TENSORS * (pages * map_us + run_us + pages * granule_us)
    own = float("inf")
    for turn in range(1, turns + 1):
        arena.ask(turn * pages, 0)
        if arena.wait_credits(turn * pages, TIMEOUT) != turn * pages:
            raise RuntimeError(f"no {pages} credits within {TIMEOUT} s")
        if turn == turns:
            fake.prices(A100)
        start = time.thread_time()
        arena.apply(2 * turn, range(10, 10 + pages), [])
        if turn < turns:
            own = min(own, (time.thread_time() - start) * 1e6)
        arena.apply(2 * turn + 1, [], range(10, 10 + pages))
        wait_until_done(arena, 2 * turn + 1)
    ratio = (fake.charged(get_native_id()) + own) / least
    arena.close()
    figure = f"{pages} neighbouring pages mapped, against the calls alone"
    return figure, f"{ratio:.2f}", "<= 1.3", ratio <= 1.3


def wait_until_done(arena: Arena, seq: int) -> None:
    end = time.monotonic() + TIMEOUT
    while arena.report().done < seq:
        if time.monotonic() > end:
            raise RuntimeError(f"command {seq} was not done within {TIMEOUT} s")
        time.sleep(0.01)


def shrink(fake: FakeCuda) -> list[Row]:
    pages = 1000
    begin(fake)
    arena = Arena(open_driver(0), [GRANULE] * TENSORS, pages)
    arena.ask(pages, 0)
    if arena.wait_credits(pages, TIMEOUT) != pages:
        raise RuntimeError(f"no {pages} credits within {TIMEOUT} s")
    arena.apply(1, range(pages), [])
    fake.prices(A100)
    start = time.thread_time()
    arena.apply(2, [], range(pages))
    busy = (time.thread_time() - start) * 1e3
    wait_until_done(arena, 2)
    left = fake.live()
    arena.close()
    return [
        (f"{pages} pages given up: the caller's thread", f"{busy:.2f} ms", "< 2 ms", busy < 2),
        (f"{pages} pages given up: handles left", f"{left.handles}", "0", left.handles == 0),
    ]


def start(fake: FakeCuda, tensors: int) -> Row:
    begin(fake)
    fake.prices(A100)
    driver = open_driver(0)
    best = float("inf")
    for _ in range(5):
        before = time.perf_counter()
        arena = Arena(driver, [GRANULE] * tensors, (128 << 30) // GRANULE // tensors)
        best = min(best, (time.perf_counter() - before) * 1e3)
        arena.close()
    return f"128 GiB reserved and ready, {tensors} tensors", f"{best:.2f} ms", "< 20 ms", best < 20


def main() -> int:
    # There is no daemon, and the agent would say so.
    logging.disable(logging.WARNING)
    fake = load()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            warm_page(fake, Path(folder)),
            growth(fake, Path(folder)),
            neighbours(fake),
            *shrink(fake),
            *(start(fake, tensors) for tensors in (1, 64, 256)),
        ]
    print(f"{'figure':56}{'measured':>12}{'bound':>10}  verdict")
    for figure, measured, bound, held in rows:
        print(f"{figure:56}{measured:>12}{bound:>10}  {'ok' if held else 'MISSED'}")
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
