"""kvquota in vLLM: `--scheduler-cls` and `--worker-cls` take the names in this package.

`kvquota.agent.engines.vllm.KvquotaScheduler`, or `KvquotaAsyncScheduler` where scheduling is asynchronous,
and `kvquota.agent.engines.vllm.KvquotaWorker`. With the entry point (see plugin) KVQUOTA=1 alone is enough.
Without it each name is vLLM's own class, in any version.
"""

import os
from pkgutil import resolve_name

# The module of each name, and what vLLM runs without kvquota. Imported on first use: vLLM's entry points load
# this package in every process.
_HOMES = {
    "KvquotaScheduler": ("scheduler", "vllm.v1.core.sched.scheduler:Scheduler"),
    "KvquotaAsyncScheduler": ("scheduler", "vllm.v1.core.sched.async_scheduler:AsyncScheduler"),
    "KvquotaWorker": ("worker", "vllm.v1.worker.cpu_worker:CPUWorker"),
}


def __getattr__(name: str) -> object:
    """Raises SettingError where kvquota does not know the installed vLLM."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvquota.agent.engines.vllm import versions
    from kvquota.agent.settings import Settings
    from vllm.logger import init_logger

    home, stock = _HOMES[name]
    if Settings.read(os.environ) is None:
        init_logger(__name__).warning("KVQUOTA is not 1: in the place of %s runs %s", name, stock)
        return resolve_name(stock)
    # Before the import: it would fail in a version that lacks something, and not say so clearly.
    versions.check()
    return resolve_name(f"{__name__}.{home}:{name}")
