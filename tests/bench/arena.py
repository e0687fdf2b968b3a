"""What pages cost an engine at an A100's prices, on the stand-in driver. Exits 1 where a bound is missed.

A model of 32 layers, K and V apart: 64 granules a page.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import get_native_id

from kvquota.agent import Agent, Settings
from kvquota.agent.contract import PageCommand
from kvquota.agent.cuda import driver, open_driver
from kvquota.agent.local_rank import LocalRank
from kvquota.native import Arena

from tests.bench.step import BLOCKS_PER_PAGE, PAGES, BenchAdapter
from tests.fakecuda.control import A100, FakeCuda, load
from tests.native.arenas import done

GRANULE = 2 << 20
TENSORS = 64
TIMEOUT = 60.0
CALLS = [*A100, "cuMemRelease", "cuEventRecord"]
# Of each granule, from its creation to its release, which costs nothing here.
PAGE_CALLS = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"]

Row = tuple[str, str, str, bool]


class GrowingAdapter(BenchAdapter):
    """One that asks for the pages that its requests will want next."""

    wants = 0

    def wanted(self) -> int:
        return self.wants


class Engine:
    """A leader and its only rank, stepped by hand, with no daemon and no limit."""

    def __init__(self, folder: Path, reserve: int, adapter: GrowingAdapter | None = None) -> None:
        self.arena = Arena(open_driver(0), [GRANULE] * TENSORS, PAGES)
        self.rank = LocalRank(self.arena)
        self.adapter = adapter or GrowingAdapter()
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


class BreathingAdapter(GrowingAdapter):
    """One that wants pages again while others leave."""

    def take(self, pages: int) -> list[int]:
        taken = self.queue.victims(pages)
        for page in taken:
            self.queue.take(page)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.queue.give(page)

    def busy(self) -> bool:
        return False


def recycled(fake: FakeCuda, folder: Path, pages: int) -> Row:
    """Pages go that an idle engine does not need, and as many are wanted while they go."""
    begin(fake)
    engine = Engine(folder, reserve=0, adapter=BreathingAdapter())
    turns = 4
    engine.adapter.wants = pages
    blocks = [block for _ in range(pages) for block in engine.take_page()]
    engine.adapter.wants = 0
    engine.step()
    fake.prices(A100)
    # Current on this thread, as an engine's is.
    driver.cupy_driver().ctxSetCurrent(driver.devicePrimaryCtxRetain(0))
    before, made = fake.charged(), fake.calls("cuMemCreate")
    for _ in range(turns):
        engine.adapter.queue.prepend_n(blocks)
        if not engine.agent.needs_step:
            raise RuntimeError(f"nothing leaves the idle engine: {engine.agent.statistics()}")
        # The pages go when the work of the step has ended.
        with fake.work(engine.arena.base, 0):
            engine.step()
            engine.adapter.wants = pages
            engine.step()
        blocks = [block for _ in range(pages) for block in engine.take_page()]
        engine.adapter.wants = 0
        engine.step()
    full = turns * pages * TENSORS * sum(sum(A100[name]) for name in PAGE_CALLS)
    ratio = (fake.charged() - before) / full
    new = fake.calls("cuMemCreate") - made
    unmapped = engine.agent.statistics().pages_unmapped
    if unmapped < turns * pages:
        raise RuntimeError(f"{unmapped} pages left and came back, and {turns * pages} were to")
    driver.cupy_driver().ctxSetCurrent(0)
    driver.cupy_driver().devicePrimaryCtxRelease(0)
    engine.close()
    figure = f"memory that stays with the engine, {pages} a time: of its price"
    return figure, f"{ratio:.1%}", "<= 25%", ratio <= 0.25 and new == 0


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
        done(arena, 2 * turn + 1)
    ratio = (fake.charged(get_native_id()) + own) / least
    arena.close()
    figure = f"{pages} neighbouring pages mapped, against the calls alone"
    return figure, f"{ratio:.2f}", "<= 1.3", ratio <= 1.3


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
    done(arena, 2)
    left = fake.live()
    arena.close()
    return [
        (f"{pages} pages given up: the caller's thread", f"{busy:.2f} ms", "< 2 ms", busy < 2),
        (f"{pages} pages given up: handles left", f"{left.handles}", "0", left.handles == 0),
    ]


def start(fake: FakeCuda, tensors: int) -> Row:
    begin(fake)
    fake.prices(A100)
    device = open_driver(0)
    best = float("inf")
    for _ in range(5):
        before = time.perf_counter()
        arena = Arena(device, [GRANULE] * tensors, (128 << 30) // GRANULE // tensors)
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
            *(recycled(fake, Path(folder), pages) for pages in (1, 8)),
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
