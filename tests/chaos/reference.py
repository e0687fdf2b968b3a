"""The reference engine in a storm: it is killed, too."""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from kvquota.agent.engines.reference.engine import Completion, Engine
from kvquota.agent.engines.reference.process import EngineProcess, memfd_bytes

from tests.chaos.subject import KilledError
from tests.support.daemon import DaemonProcess
from tests.support.reference import PAGE_BYTES
from tests.support.scene import NAME, PAGES, Scene

_END_S = 60.0


class ReferenceSubject:
    """See Subject. A null block, and with it the floor, is there where `floor` is 1."""

    name = "reference"
    instance = NAME
    page_bytes = PAGE_BYTES
    pages = PAGES
    at_once = 24
    hangs_up = 0.0

    def __init__(self, daemon: DaemonProcess, model: Path, floor: int) -> None:
        self.floor = floor
        self._scene = Scene(daemon, model)
        self._model = model
        self._engine: EngineProcess | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    def _running(self) -> EngineProcess:
        assert self._engine is not None
        return self._engine

    def answers(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        with closing(Engine(self._model, blocks=4000)) as engine:
            return [completion.tokens for completion in engine.generate(prompts, most)]

    def start(self) -> None:
        self._engine = self._scene.start(*["--null-block"] * self.floor)

    def submit(self, prompt: Sequence[int], most: int, patience: float | None) -> "Future[list[int]]":
        assert patience is None
        engine = self._running()
        answer = Future[list[int]]()

        def fail(error: BaseException) -> None:
            killed = engine.process.wait(_END_S) == -signal.SIGKILL
            answer.set_exception(KilledError() if killed else error)

        def take(done: Future[Completion]) -> None:
            if (error := done.exception()) is None:
                answer.set_result(done.result().tokens)
            else:
                fail(error)

        try:
            engine.submit(prompt, most).add_done_callback(take)
        except RuntimeError as error:  # it does not listen
            fail(error)
        return answer

    def events(self) -> list[Callable[[], None]]:
        return [self._kill_engine]

    def _kill_engine(self) -> None:
        self._running().kill()
        self.start()

    def held_bytes(self, pid: int) -> int:
        return memfd_bytes(pid)

    def books(self) -> list[str]:
        return []

    def stop(self) -> list[str]:
        status = self._running().stop()
        return [f"the engine ends with {status}"] if status else []

    def close(self) -> None:
        self._scene.close()
