"""An engine with nothing to do does nothing."""

import time
from pathlib import Path

from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import until
from tests.support.reference import PAGE_BYTES
from tests.support.scene import Scene

WINDOW_S = 2.5


def switches(pid: int) -> int:
    """How often the kernel has switched to a thread of the process."""
    lines = [
        line
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if "ctxt_switches" in line
    ]
    return sum(int(line.split()[1]) for line in lines)


def test_idle_engine_makes_no_wakeups(scene: Scene) -> None:
    engine = scene.start()
    engine.generate([[3, 4, 5]], 4)
    until("connected", lambda: scene.status().connected)

    def nothing_happened() -> bool:
        before = switches(engine.pid)
        time.sleep(WINDOW_S)
        return switches(engine.pid) == before

    # Not at once: warm pages go first. Anything that polls ends in no window.
    until("a window without a wake-up", nothing_happened)
    assert scene.limit(2, engine).status == pb.STATUS_APPLIED


def test_the_reserve_of_an_idle_engine_goes_and_comes_back_with_a_request(scene: Scene) -> None:
    engine = scene.start(reserve=PAGE_BYTES)
    # Too short to leave anything in the cache.
    served = engine.generate([[3, 4, 5]], 4)
    scene.until_pages(engine, 1, 2)
    scene.until_pages(engine, 0, 0)
    until("the books to say so", lambda: scene.status().mapped_bytes == 0)
    assert engine.generate([[3, 4, 5]], 4) == served
