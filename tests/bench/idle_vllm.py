"""How soon an idle vLLM with a full cache has given memory back, from just before SetLimit, with no traffic.

Up to 256 MiB: decided within 10 ms, applied within 100 ms. Beyond: applied within 1.3 times the bare system
calls on as many granules, turn by turn. Medians; exits 1 where a bound is missed.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvquota.v1 import quota_pb2 as pb

from tests.bench.reclaim import bare
from tests.support.daemon import DaemonProcess
from tests.support.vllm import Engine
from tests.support.vllm_pages import OUTPUT, PAGE_BYTES, model, prompts, start

PAGES = 72
TURNS = 3
NAME = "bench"
DECIDED_MS, APPLIED_MS, RATIO = 10.0, 100.0, 1.3


def fill(engine: Engine, daemon: DaemonProcess) -> int:
    """Pages that are mapped once a whole cache is full."""
    daemon.set(NAME, None)
    assert engine.call("reset_prefix_cache")
    engine.generate(prompts(range(PAGES)), OUTPUT)
    return engine.kv_bytes() // PAGE_BYTES


def shrink(engine: Engine, daemon: DaemonProcess, pages: int) -> tuple[float, float]:
    """Milliseconds to decided and to applied, for a limit that takes `pages`."""
    limit = (fill(engine, daemon) - pages) * PAGE_BYTES
    with daemon.stub() as stub:
        stub.GetInstance(pb.GetInstanceRequest(name=NAME))  # connects
        begun = time.monotonic_ns()
        request = pb.SetLimitRequest(name=NAME, limit_bytes=limit, wait=True)
        instance = stub.SetLimit(request).instance
    assert instance.status == pb.STATUS_APPLIED
    assert engine.kv_bytes() <= limit
    return (instance.decided_monotonic_ns - begun) / 1e6, (instance.applied_monotonic_ns - begun) / 1e6


def main() -> int:
    """Print the table; 1 where a bound is missed."""
    missed = False

    def row(figure: str, value: float, bound: float, unit: str) -> None:
        nonlocal missed
        missed |= value > bound
        print(f"{figure:44}{value:>10.1f}{bound:>10.1f} {unit:8}{'ok' if value <= bound else 'MISSED'}")

    with tempfile.TemporaryDirectory(prefix="kvq") as folder:
        daemon = DaemonProcess(Path(folder))
        daemon.start()
        environment = daemon.environment(NAME)
        engine = start(model(Path(folder) / "model"), environment, PAGES * 16)
        try:
            print(f"{'figure':44}{'measured':>10}{'bound':>10} {'unit':8}verdict")
            for pages in (8, 32):
                turns = [shrink(engine, daemon, pages) for _ in range(TURNS)]
                decided, applied = (statistics.median(side) for side in zip(*turns, strict=True))
                size = f"{pages * PAGE_BYTES >> 20} MiB of an idle cache"
                row(f"{size}, decided", decided, DECIDED_MS, "ms")
                row(f"{size}, applied", applied, APPLIED_MS, "ms")
            pages = 60
            pairs = [(bare(range(pages)) * 1e3, shrink(engine, daemon, pages)[1]) for _ in range(TURNS)]
            size = f"{pages * PAGE_BYTES >> 20} MiB of an idle cache"
            row(
                f"{size}, applied",
                statistics.median(ours / theirs for theirs, ours in pairs),
                RATIO,
                "x bare",
            )
        finally:
            engine.close()
            daemon.stop()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
