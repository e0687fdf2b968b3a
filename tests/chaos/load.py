"""Requests that share prefixes, many at a time, each held against what the unmodified engine answers."""

import random
import threading
from concurrent.futures import Future

from tests.chaos.subject import KilledError, Subject
from tests.support.reference import prompts

_MAX_TOKENS = (1, 8, 40)
_MOST_PATIENCE_S = 2.0
_ANSWER_S = 60.0


class Load:
    """Keeps an engine busy until it is left."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.faults: list[str] = []
        self.served = self.lost = self.hung_up = 0
        """Requests that were answered; that went down with an engine that was killed; whose client left."""
        self._subject = subject
        self._random = random.Random(seed)
        self._stream = prompts(60, seed=seed)
        self._expected = subject.answers(self._stream, max(_MAX_TOKENS))
        self._slots = threading.Semaphore(subject.at_once)
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
        at_once = self._subject.at_once
        for left in range(at_once):
            if not self._slots.acquire(timeout=_ANSWER_S):
                self.faults.append(f"{at_once - left} requests got no answer within {_ANSWER_S:.0f} s")
                return

    def _run(self) -> None:
        while not self._stop.is_set():
            # With a time-out, because under limit 0 nothing is answered.
            if self._slots.acquire(timeout=0.1):
                self._submit()

    def _submit(self) -> None:
        index = self._random.randrange(len(self._stream))
        most = self._random.choice(_MAX_TOKENS)
        hangs_up = self._random.random() < self._subject.hangs_up
        patience = self._random.uniform(0.0, _MOST_PATIENCE_S) if hangs_up else None
        future = self._subject.submit(self._stream[index], most, patience)
        if future.done() and isinstance(future.exception(), KilledError):
            self._stop.wait(0.05)  # another one is being started
        future.add_done_callback(lambda done: self._take(index, self._expected[index][:most], hangs_up, done))

    def _take(self, index: int, expected: list[int], hangs_up: bool, done: "Future[list[int]]") -> None:
        self._slots.release()
        error = done.exception()
        if isinstance(error, KilledError):
            self.lost += 1
        elif error is not None:
            self.faults.append(f"request {index} fails on an engine that nobody killed: {error}")
        elif (tokens := done.result()) == expected:
            self.served += 1
        elif hangs_up and tokens == expected[: len(tokens)]:
            self.hung_up += 1
        else:
            self.faults.append(f"request {index}: {tokens}, not {expected}")
