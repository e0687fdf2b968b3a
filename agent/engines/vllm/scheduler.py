"""vLLM's schedulers with an agent: it acts at the top of a step, and its page command rides the output."""

import os
import sys
from types import FrameType
from typing import Any

from kvquota.agent.agent import Agent
from kvquota.agent.engines.vllm import versions
from kvquota.agent.engines.vllm.adapter import VllmAdapter
from kvquota.agent.engines.vllm.layout import COMMAND, Layout
from kvquota.agent.engines.vllm.log import log_with_vllm
from kvquota.agent.engines.vllm.pool import ElasticBlockPool, ElasticKVCacheManager
from kvquota.agent.geometry import Geometry
from kvquota.agent.rank_link import RemoteRank, rank_address
from kvquota.agent.settings import Settings
from kvquota.native import PageQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.request import RequestStatus

_RANK_TIMEOUT_S = 10.0
# Whatever ends a shortage rings, so this bounds only what a lost ring could cost.
_LONGEST_REST_S = 1.0


class _Elastic(Scheduler):
    """What both schedulers add to vLLM's."""

    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = Settings.required(os.environ)
        log_with_vllm()
        versions.check_config(self.vllm_config)
        self._engine = _engine_core()
        self._asleep = False
        geometry = Layout.of(self.kv_cache_config).geometry()
        queue = self._become_elastic(geometry)
        self._adapter = VllmAdapter(self, geometry, queue, self._wake)
        self.kv_cache_manager.adapter = self.kv_cache_manager.block_pool.adapter = self._adapter
        engine_id = self.vllm_config.instance_id
        ranks = [
            RemoteRank(rank_address(engine_id, rank), f"rank {rank}", geometry, _RANK_TIMEOUT_S)
            for rank in range(self.vllm_config.parallel_config.world_size)
        ]
        self._agent = Agent(
            self._adapter,
            ranks,
            pages=geometry.pages,
            floor=1,
            settings=settings,
            # An engine core in its user's process has no loop: it steps when the user asks for tokens.
            wakes=isinstance(self._engine, EngineCoreProc),
        )
        self._adapter.grow_now = self._agent.grow_now
        self._adapter.ask = self._agent.ask
        self._adapter.room = lambda: self._agent.room
        self._adapter.target_pages = lambda: self._agent.target_pages

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM, between the agent's two calls."""
        if self._sleeps() != self._asleep:
            self._asleep = not self._asleep
            if self._asleep:
                self._agent.suspend()
            else:
                self._agent.resume()
        self._agent.begin_step()
        self._adapter.begin_scheduling()
        output = super().schedule(*args, **kwargs)
        self._adapter.end_scheduling()
        command = self._agent.end_step()
        if command is not None:
            setattr(output, COMMAND, command)
        elif not output.total_num_scheduled_tokens and self._only_memory_helps():
            self._rest(output)
        return output

    def has_requests(self) -> bool:
        """As vLLM, and while the agent has something to do that needs a step. Never while it only waits."""
        if super().has_requests():
            return True
        if getattr(self._engine, "shutdown_state", None) == EngineShutdownState.SHUTTING_DOWN:
            # The last look before the workers are ended: leave while they still answer.
            self._agent.close()
            return False
        self._agent.poll()
        if self._sleeps() != self._asleep or self._agent.needs_step:
            return True
        if self._engine._idle_state_callbacks:
            # They may put the engine to sleep, and its loop waits for input next, without another look.
            self._wake()
        return False

    def shutdown(self) -> None:
        """Leave, where that is not done, then as vLLM."""
        self._agent.close()
        super().shutdown()

    def _become_elastic(self, geometry: Geometry) -> PageQueue:
        """Put a PageQueue in the place of the free list, with only the null block's page in circulation."""
        pool = self.kv_cache_manager.block_pool
        queue = PageQueue(pool.blocks, geometry.ranges())
        queue.put(0)
        queue.remove(pool.null_block)
        pool.free_block_queue = queue
        pool.__class__ = ElasticBlockPool
        self.kv_cache_manager = ElasticKVCacheManager.of(
            self.kv_cache_manager, self.scheduler_config.watermark
        )
        return queue

    def _sleeps(self) -> bool:
        """Whether vLLM has put the KV cache to sleep. It tells no scheduler."""
        return "kv_cache" in self._engine.model_executor.sleeping_tags

    def _wake(self) -> None:
        inputs = getattr(self._engine, "input_queue", None)
        if inputs is not None:
            inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _only_memory_helps(self) -> bool:
        """Whether the request that vLLM looks at first was refused memory: it looks at none behind it.

        One that waits for anything else (its grammar, remote KV, a LoRA slot) is passed over, and is first
        again at the next step: it may advance by stepping alone. A session without input waits for a request.
        """
        for request in versions.in_order(self):
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                return request is self._adapter.not_admitted
        return False

    def _rest(self, output: SchedulerOutput) -> None:
        """Sleep until the engine core is told something: a limit or a credit, a request, an abort, a signal.

        Without it a loop that can admit nothing spins. News that came since begin_step is still in the input
        queue. No sleep while a step with tokens is in flight, or blocks are yet to be freed.
        """
        inputs = getattr(self._engine, "input_queue", None)
        in_flight = any(step.total_num_scheduled_tokens for _, step, _ in self._engine.batch_queue or ())
        if (
            inputs is None
            or in_flight
            or output.finished_req_ids
            or self.running
            or self.deferred_frees
            or self.connector is not None
            or self.ec_connector is not None
            or self.parallel_config.data_parallel_size > 1
            or self._agent.needs_step
        ):
            return
        with inputs.not_empty:
            inputs.not_empty.wait_for(lambda: inputs.queue, _LONGEST_REST_S)


class KvquotaScheduler(_Elastic):
    """For synchronous scheduling."""


class KvquotaAsyncScheduler(_Elastic, AsyncScheduler):
    """For asynchronous scheduling."""


def _engine_core() -> Any:
    """The engine core that is building this scheduler. It passes no reference, and no call gives one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCore):
            return owner
        frame = frame.f_back
    raise RuntimeError("no EngineCore is building this scheduler: nothing could wake it")
