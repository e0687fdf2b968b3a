"""The entry point of vLLM's general plugins: KVQUOTA=1 alone puts kvquota in. Explicit flags still win."""

import os
from typing import Any

_PACKAGE = "kvquota.agent.engines.vllm"


def register() -> None:
    """Make ours the default scheduler and worker. vLLM calls it in every process, also without kvquota."""
    if os.environ.get("KVQUOTA", "") in ("", "0"):
        return
    from kvquota.agent.engines.vllm import versions
    from kvquota.agent.settings import Settings
    from vllm.config import SchedulerConfig
    from vllm.platforms import current_platform

    Settings.read(os.environ)
    versions.known()
    stock_scheduler = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(self: Any) -> Any:
        if self.scheduler_cls is None:
            self.scheduler_cls = f"{_PACKAGE}.Kvquota{'Async' if self.async_scheduling else ''}Scheduler"
        return stock_scheduler(self)

    platform: Any = type(current_platform)
    stock_update = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        automatic = vllm_config.parallel_config.worker_cls == "auto"
        stock_update(cls, vllm_config)
        if automatic:
            vllm_config.parallel_config.worker_cls = f"{_PACKAGE}.KvquotaWorker"

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    platform.check_and_update_config = classmethod(check_and_update_config)
