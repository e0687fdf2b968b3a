"""The reference engine, in this process and on a thread of its own."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from kvquota.agent import Settings
from kvquota.agent.engines.reference.engine import Completion, Engine

from tests.conformance.case import EngineCase
from tests.support.reference import BLOCK_TOKENS, PAGE_BLOCKS, PAGE_TOKENS, write_model

PAGES = 12
TIMEOUT = 60.0


class ReferenceEngine:
    def __init__(self, environment: Mapping[str, str], floor: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._engine = Engine(
                write_model(Path(folder)),
                blocks=PAGES * PAGE_BLOCKS,
                block_tokens=BLOCK_TOKENS,
                null_block=floor > 0,
                settings=Settings.read(environment),
            )
        self._requests: list[Future[Completion]] = []

    def submit(self, prompt: Sequence[int], tokens: int) -> int:
        self._requests.append(self._engine.submit(prompt, tokens))
        return len(self._requests) - 1

    def output(self, request: int) -> list[int] | None:
        future = self._requests[request]
        return future.result().tokens if future.done() else None

    def cached(self, request: int) -> int:
        return self._requests[request].result().hit_tokens

    def step(self) -> None:
        """Its thread steps."""

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake_up(self) -> None:
        self._engine.wake_up()

    def memory_bytes(self) -> int:
        total = 0
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            if os.path.exists(path) and "kvquota-granules" in os.readlink(path):
                total += os.stat(path).st_blocks * 512
        return total

    def close(self) -> None:
        self._engine.close()


@dataclass
class ReferenceCase:
    name: str
    floor: int
    vocabulary: int = 1000
    tokens_per_page: int = PAGE_TOKENS
    longest: int = 3 * PAGE_TOKENS

    def make(self, environment: Mapping[str, str]) -> ReferenceEngine:
        return ReferenceEngine(environment, self.floor)


CASE: EngineCase = ReferenceCase("reference", floor=0)
