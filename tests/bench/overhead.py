"""What kvquota costs vLLM while its limit is never reached, against vLLM without it: `make bench-overhead`.

Both engines live side by side and are asked the same in turns, so that whatever else the machine does falls
on both; the idle one sleeps. Decoding in small steps, with prefixes that hit and a cache that is full. CPU is
that of all processes of an engine, idle ones included. Medians over the pairs; exits 1 where one is missed.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvquota.agent.engines.reference.checkpoint import Shape, write_checkpoint

from tests.support.daemon import DaemonProcess
from tests.support.vllm import Engine
from tests.support.vllm_pages import prompt

# As small as vLLM runs it: what a step costs besides the model counts most.
SHAPE = Shape(layers=1, hidden=64, intermediate=64, heads=2)
BLOCK_TOKENS = 32
BLOCK_BYTES = 32 << 10
KV_BYTES = 32 << 20
REQUESTS = 16
SHARED_TOKENS, OWN_TOKENS, OUTPUT = 192, 30, 16
FILL_ROUNDS = 40
BOUND = 1.01
NAME = "bench"


@dataclass
class Side:
    """One of the two engines, and what its rounds took."""

    engine: Engine
    began: list[float] = field(default_factory=list)
    """CPU seconds that it had used when a round began: a round's is up to the next one's beginning."""

    walls: list[float] = field(default_factory=list)

    def round(self, number: int) -> None:
        """Ask for one round's tokens."""
        shared = prompt(0, SHARED_TOKENS)
        own = [1 + number * REQUESTS + n for n in range(REQUESTS)]
        self.began.append(cpu_seconds(self.engine))
        start = time.monotonic()
        replies = self.engine.generate([shared + prompt(n, OWN_TOKENS) for n in own], OUTPUT)
        self.walls.append(time.monotonic() - start)
        assert all(len(reply.tokens) == OUTPUT for reply in replies)

    def cpu(self) -> list[float]:
        """CPU seconds of each round."""
        ends = [*self.began[1:], cpu_seconds(self.engine)]
        return [end - began for began, end in zip(self.began, ends, strict=True)]

    def forget(self) -> None:
        """Begin anew."""
        self.began.clear()
        self.walls.clear()


def cpu_seconds(engine: Engine) -> float:
    """Of all threads of the engine's processes, in nanoseconds; /proc/PID/stat has ticks of 10 ms."""
    total = 0
    for pid in engine.pids():
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # ended meanwhile
                total += int(task.read_text().split()[0])
    return total / 1e9


def ratios(ours: Iterable[float], stock: Iterable[float]) -> list[float]:
    return [own / theirs for own, theirs in zip(ours, stock, strict=True)]


def spread(values: list[float]) -> float:
    """The true median is nearer than this 19 times in 20: from order statistics."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    middle = len(ordered) / 2
    low = max(0, round(middle - half))
    high = min(len(ordered) - 1, round(middle + half))
    return (ordered[high] - ordered[low]) / 2


def measure(stock: Side, ours: Side, pairs: int) -> int:
    """Print the table; 1 where the bound is missed."""
    tokens = REQUESTS * OUTPUT
    for number in range(FILL_ROUNDS):
        stock.round(number)
        ours.round(number)
    growth = sum(ours.cpu()) / sum(stock.cpu())
    stock.forget()
    ours.forget()
    for pair in range(pairs):
        for side in (stock, ours) if pair % 2 else (ours, stock):
            side.round(FILL_ROUNDS + pair)
    cpu, walls = ratios(ours.cpu(), stock.cpu()), ratios(stock.walls, ours.walls)
    noise = ratios(stock.cpu()[1::2], stock.cpu()[: len(cpu) // 2 * 2 : 2])
    per_token = statistics.median(stock.cpu()) / tokens * 1e6
    rate = tokens / statistics.median(stock.walls)
    missed = statistics.median(cpu) > BOUND
    print(f"vLLM: {per_token:.0f} us of CPU a token, {rate:.0f} tokens a second; {pairs} pairs")
    print(f"{'with kvquota, against without':44}{'ratio':>10}{'+-':>10}{'bound':>10}  verdict")
    print(row("CPU seconds per token", cpu) + f"{BOUND:>10.2f}  {'MISSED' if missed else 'ok'}")
    print(row("throughput", walls))
    print(row("vLLM against itself, CPU seconds per token", noise))
    print(row("CPU seconds per token while the cache fills", [growth]))
    return int(missed)


def row(figure: str, values: list[float]) -> str:
    error = f"{spread(values):.4f}" if len(values) > 1 else ""
    return f"{figure:44}{statistics.median(values):>10.4f}{error:>10}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="asynchronous scheduling")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvq") as folder:
        daemon = DaemonProcess(Path(folder))
        daemon.start()
        environment = daemon.environment(NAME)
        checkpoint = write_checkpoint(Path(folder) / "model", shape=SHAPE)
        options = {
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": KV_BYTES,
            "async_scheduling": arguments.asynchronous,
        }
        engines: list[Engine] = []
        try:
            engines.append(Engine(checkpoint, {}, **options))
            engines.append(Engine(checkpoint, environment, **options))
            daemon.set(NAME, KV_BYTES, wait=True)
            return measure(Side(engines[0]), Side(engines[1]), arguments.pairs)
        finally:
            for engine in engines:
                engine.close()
            daemon.stop()


if __name__ == "__main__":
    sys.exit(main())
