"""Requests that share prefixes, a few at a time, each held against what the unmodified engine answers."""

import random
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from kvquota.agent.engines.reference.engine import Completion, Engine
from kvquota.agent.engines.reference.process import EngineProcess

from tests.support.reference import prompts

_AT_ONCE = 24
_MAX_TOKENS = (1, 8, 40)
_ANSWER_S = 60.0


def answers(model: Path, stream: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """What the unmodified engine says to each prompt."""
    with closing(Engine(model, blocks=4000)) as engine:
        return [completion.tokens for completion in engine.generate(stream, most)]


class Load:
    """Keeps an engine busy until it is left. `engine` is asked for anew for each request."""

    def __init__(self, model: Path, seed: int, engine: Callable[[], EngineProcess]) -> None:
        self.faults: list[str] = []
        self.served = self.lost = 0
        """Requests that were answered, and those that went down with an engine that was killed."""
        self._random = random.Random(seed)
        self._stream = prompts(60, seed=seed)
        self._expected = answers(model, self._stream, max(_MAX_TOKENS))
        self._engine = engine
        self._slots = threading.Semaphore(_AT_ONCE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask for no more. What was asked for is still answered: see `drain`."""
        self._stop.set()
        self._thread.join()

    def drain(self) -> None:
        """Wait for the answers that are due."""
        for left in range(_AT_ONCE):
            if not self._slots.acquire(timeout=_ANSWER_S):
                self.faults.append(f"{_AT_ONCE - left} requests got no answer within {_ANSWER_S:.0f} s")
                return

    def _run(self) -> None:
        while not self._stop.is_set():
            # With a time-out, because under limit 0 nothing is answered.
            if self._slots.acquire(timeout=0.1):
                self._submit()

    def _submit(self) -> None:
        index = self._random.randrange(len(self._stream))
        most = self._random.choice(_MAX_TOKENS)
        engine = self._engine()
        try:
            future = engine.submit(self._stream[index], most)
        except RuntimeError:  # it was killed
            self._take(engine, index, most, None)
            self._stop.wait(0.05)
        else:
            future.add_done_callback(lambda done: self._take(engine, index, most, done))

    def _take(self, engine: EngineProcess, index: int, most: int, done: Future[Completion] | None) -> None:
        self._slots.release()
        if done is None or done.exception() is not None:
            if engine.process.wait(_ANSWER_S) == -signal.SIGKILL:
                self.lost += 1
            else:
                why = done.exception() if done is not None else "it does not listen"
                self.faults.append(f"request {index} fails on an engine that nobody killed: {why}")
        elif done.result().tokens == self._expected[index][:most]:
            self.served += 1
        else:
            self.faults.append(f"request {index}: {done.result().tokens}, not {self._expected[index][:most]}")
