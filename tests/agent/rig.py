"""An agent over a real arena, with a model engine that a test steps."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvquota.agent import Agent, Settings
from kvquota.agent.contract import PageCommand
from kvquota.agent.local_rank import LocalRank
from kvquota.native import Arena, FaultDriver, HostDriver

from tests.agent.model import MIB, ModelAdapter

PAGE = 2 * MIB
TIMEOUT = 10.0


class WakingAdapter(ModelAdapter):
    """Lets a test wait for wake()."""

    def __init__(self, floor: int = 0) -> None:
        super().__init__(floor)
        self.rung = threading.Event()

    def wake(self) -> None:
        super().wake()
        self.rung.set()


class AgentRig:
    """One engine process's worth of parts. `socket`: where the daemon is, if there is one."""

    def __init__(
        self, socket: Path, *, pages: int = 16, reserve: int = 0, default_limit: int | None = None
    ) -> None:
        self.driver = HostDriver(fill=0xFF)
        self.faults = FaultDriver(self.driver)
        self.arena = Arena(self.faults, [PAGE], pages)
        self.rank = LocalRank(self.arena, self.driver)
        self.adapter = WakingAdapter()
        self.settings = Settings(
            "test", socket=socket, default_limit=default_limit, reserve_bytes=reserve * PAGE
        )
        try:
            self.agent = Agent(self.adapter, [self.rank], pages=pages, floor=0, settings=self.settings)
        except BaseException:
            self.arena.close()
            raise

    def step(self) -> PageCommand | None:
        self.agent.begin_step()
        command = self.agent.end_step()
        if command is not None:
            self.rank.apply(command)
        return command

    def needs_step(self) -> bool:
        return self.agent.needs_step

    def turn(self) -> None:
        """One turn of an idle engine's loop."""
        self.adapter.rung.wait(0.01)
        self.adapter.rung.clear()
        self.agent.poll()
        if self.agent.needs_step:
            self.step()

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT
        while not reached():
            assert time.monotonic() < end, self.agent.statistics()
            self.turn()

    def fill(self, pages: int) -> None:
        """Have `pages` of cache mapped."""
        self.adapter.wants = pages
        self.step()
        self.until(lambda: self.adapter.allowed >= pages)
        grown = self.adapter.grow(pages)
        self.adapter.wants = 0
        self.step()
        self.adapter.become("evictable", *grown)

    def close(self) -> None:
        self.agent.close()
        self.arena.close()
