"""The reference engine's KV memory under kvquota: geometry, arena, rank, adapter and agent, put together."""

import logging
from collections.abc import Callable, Sequence

from kvquota.agent.agent import Agent
from kvquota.agent.contract import PageCommand
from kvquota.agent.engines.reference.adapter import ReferenceAdapter
from kvquota.agent.engines.reference.memory import block_bytes, elastic_kv
from kvquota.agent.engines.reference.model import Qwen3
from kvquota.agent.engines.reference.scheduler import Block, Scheduler
from kvquota.agent.geometry import Geometry
from kvquota.agent.local_rank import LocalRank
from kvquota.agent.settings import Settings
from kvquota.native import Arena, DriverError, HostDriver

_START_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Elastic:
    """Of one engine: it is leader and only rank."""

    agent: Agent

    def __init__(self, model: Qwen3, blocks: int, block_tokens: int, settings: Settings) -> None:
        """Reserve the addresses. Raises SettingError where no page size fits."""
        driver = HostDriver(fill=settings.host_fill)
        sizes = block_bytes(model, block_tokens)
        geometry = Geometry.choose(sizes, blocks, driver.granularity, "--block-tokens")
        self.ranges = geometry.ranges()
        self._settings = settings
        self._arena = Arena(driver, geometry.strides(sizes), geometry.pages)
        self._rank = LocalRank(self._arena, driver)
        self.kv = elastic_kv(model, blocks, block_tokens, self._arena)

    def map_floor(self) -> None:
        """Put memory behind page 0, before anything else. Raises DriverError."""
        self._arena.ask(1, 0)
        self._arena.wait_credits(1, _START_TIMEOUT_S)
        self._arena.apply(0, [0], [])

    def join(
        self, scheduler: Scheduler, pool: Sequence[Block], *, null_block: bool, wake: Callable[[], None]
    ) -> None:
        """Start the agent. Raises SettingError where the daemon refuses the instance."""
        self._scheduler = scheduler
        self._pool = pool
        self._adapter = ReferenceAdapter(scheduler, pool, self.ranges, null_block=null_block, wake=wake)
        self.agent = Agent(
            self._adapter,
            [self._rank],
            pages=len(self.ranges),
            floor=int(null_block),
            settings=self._settings,
        )
        scheduler.grow = self._grow

    def wants_step(self) -> bool:
        """Of an engine with no request: read what came, show what is free, and say whether a step is due."""
        self.agent.poll()
        return self.agent.needs_step

    def suspend(self) -> None:
        """The engine sleeps: give every page back. Between steps, with nothing cached and nothing running."""
        self.agent.suspend()
        self._empty_step()

    def resume(self) -> None:
        """It is awake again."""
        self.agent.resume()
        self._empty_step()

    def apply(self, command: PageCommand | None) -> None:
        """Do what a step needs before it runs. Requests on pages that cannot be mapped are preempted."""
        if command is None:
            return
        try:
            self._rank.apply(command)
        except DriverError as error:
            logger.error("pages %s are lost to the engine: %s", command.maps, error)
            for page in command.maps:
                self._abandon(page)

    def close(self) -> None:
        """Leave the daemon and give all memory back. The tensors must be gone."""
        self.agent.close()
        self._arena.close()

    def _grow(self, blocks: int) -> None:
        self.agent.grow_now(self._adapter.pages_for(blocks))

    def _empty_step(self) -> None:
        self.agent.begin_step()
        self.apply(self.agent.end_step())

    def _abandon(self, page: int) -> None:
        """Have nothing use a page that has no memory: hold its blocks for ever."""
        blocks = self._pool[slice(*self.ranges[page])]
        for request in list(self._scheduler.running):
            if not set(blocks).isdisjoint(request.blocks):
                self._scheduler.preempt(request)
        self._scheduler.forget(blocks)
        for block in blocks:
            self._scheduler.queue.remove(block)
            block.ref_cnt = 1
