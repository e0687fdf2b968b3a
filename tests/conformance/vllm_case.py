"""vLLM on CPU, in processes of its own."""

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.case import EngineCase
from tests.support.vllm import Reply
from tests.support.vllm_pages import BLOCK_BYTES, PAGE_BYTES, PAGE_TOKENS, SHAPE, model, start

PAGES = 12


class VllmEngine:
    def __init__(self, environment: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._engine = start(model(Path(folder)), dict(environment), PAGES * PAGE_BYTES // BLOCK_BYTES)
        self._requests: list[Future[Reply]] = []

    def submit(self, prompt: Sequence[int], tokens: int) -> int:
        self._requests.append(self._engine.request(prompt, tokens))
        return len(self._requests) - 1

    def output(self, request: int) -> list[int] | None:
        future = self._requests[request]
        return future.result().tokens if future.done() else None

    def cached(self, request: int) -> int:
        return self._requests[request].result().cached

    def step(self) -> None:
        """Its EngineCore steps."""

    def reset_prefix_cache(self) -> None:
        assert self._engine.call("reset_prefix_cache")

    def sleep(self) -> None:
        self._engine.call("sleep")

    def wake_up(self) -> None:
        self._engine.call("wake_up")

    def memory_bytes(self) -> int:
        return self._engine.kv_bytes()

    def close(self) -> None:
        self._engine.close()


@dataclass
class VllmCase:
    name: str = "vllm"
    vocabulary: int = SHAPE.vocab - 1
    tokens_per_page: int = PAGE_TOKENS
    longest: int = 3 * PAGE_TOKENS
    floor: int = 1

    def make(self, environment: Mapping[str, str]) -> VllmEngine:
        return VllmEngine(environment)


CASE: EngineCase = VllmCase()
