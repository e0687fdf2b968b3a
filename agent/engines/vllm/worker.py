"""vLLM's worker with an elastic KV buffer: a step applies its page command first."""

import os
from contextlib import AbstractContextManager
from typing import Any

from kvquota.agent.engines.vllm import versions
from kvquota.agent.engines.vllm.buffer import Allocation, KvBuffer
from kvquota.agent.engines.vllm.layout import COMMAND, Layout
from kvquota.agent.engines.vllm.log import log_with_vllm
from kvquota.agent.rank_link import rank_address
from kvquota.agent.rank_server import RankServer
from kvquota.agent.settings import Settings
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker


class KvquotaWorker(CPUWorker):
    """vLLM's worker for CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = Settings.required(os.environ)
        self._buffer: KvBuffer | None = None
        self._server: RankServer | None = None
        log_with_vllm()
        versions.check_config(self.vllm_config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """As vLLM, with the KV cache over pages. Raises SettingError."""
        layout = Layout.of(kv_cache_config)
        self._buffer = buffer = KvBuffer(layout, self._settings.host_fill)
        arena = buffer.arena
        super().initialize_from_config(layout.place(kv_cache_config, arena.offsets, arena.size))
        address = rank_address(self.vllm_config.instance_id, self.rank)
        self._server = RankServer(arena, buffer.geometry, address, buffer.driver)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self._buffer is not None:
            return Allocation(self._buffer)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As vLLM, once the pages are there that the step uses."""
        command = getattr(scheduler_output, COMMAND, None)
        if command is not None and self._buffer is not None:
            self._buffer.apply(command)
        return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Hang up on the leader, then as vLLM. The arena ends with the process: tensors point into it."""
        if self._server is not None:
            self._server.close()
        super().shutdown()
