"""vLLM in a storm: clients hang up, its prefix cache is reset, and a checker walks its blocks meanwhile."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from tests.support.daemon import DaemonProcess, until
from tests.support.vllm import Engine, Reply
from tests.support.vllm_pages import PAGE_BYTES, start

_RUNNING = 32


class VllmSubject:
    """See Subject."""

    name = "vllm"
    instance = "vllm"
    page_bytes = PAGE_BYTES
    pages = 64
    floor = 1
    at_once = 96
    hangs_up = 0.2

    def __init__(self, daemon: DaemonProcess, model: Path, seed: int, *, asynchronous: bool) -> None:
        self.pid = 0
        self._daemon = daemon
        self._model = model
        self._random = random.Random(seed)
        self._options = {"async_scheduling": asynchronous, "max_num_seqs": _RUNNING}
        self._engine: Engine | None = None
        self._faults: list[str] = []

    def _running(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _start(self, environment: dict[str, str]) -> Engine:
        return start(self._model, environment, self.pages * 16, **self._options)

    def answers(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        stock = self._start({})
        try:
            return [reply.tokens for reply in stock.generate(prompts, most)]
        finally:
            stock.close()

    def start(self) -> None:
        self._engine = self._start(
            {
                **self._daemon.environment(self.instance),
                "KVQUOTA_RESERVE_BYTES": str(4 * PAGE_BYTES),
                "KVQUOTA_HOST_FILL": "255",
            }
        )
        until("the engine to join", lambda: self._daemon.get(self.instance).connected)
        self.pid = self._daemon.get(self.instance).pid

    def submit(self, prompt: Sequence[int], most: int, patience: float | None) -> "Future[list[int]]":
        answer = Future[list[int]]()

        def take(done: Future[Reply]) -> None:
            if (error := done.exception()) is None:
                answer.set_result(done.result().tokens)
            else:
                answer.set_exception(error)

        self._running().request(prompt, most, patience).add_done_callback(take)
        return answer

    def events(self) -> list[Callable[[], None]]:
        return [self._reset_prefix_cache] * 4 + [self._check_blocks] * 4

    def _reset_prefix_cache(self) -> None:
        """In half of the cases with what runs preempted: else it is refused where anything runs."""
        self._running().call("reset_prefix_cache", reset_running_requests=self._random.random() < 0.5)

    def _check_blocks(self) -> None:
        self._faults += self._running().check_blocks()

    def held_bytes(self, pid: int) -> int:
        if pid != self.pid:
            raise ProcessLookupError(f"{pid} leads no engine: {self.pid} does")
        return self._running().kv_bytes()

    def books(self) -> list[str]:
        return self._faults + self._running().check_books()

    def stop(self) -> list[str]:
        return [] if self._running().close() else ["the engine does not end by itself within 30 s"]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.kill()
