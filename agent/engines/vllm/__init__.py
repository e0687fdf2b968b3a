"""kvquota in vLLM: `--scheduler-cls` and `--worker-cls` take the names in this package.

`kvquota.agent.engines.vllm.KvquotaScheduler`, or `KvquotaAsyncScheduler` where scheduling is asynchronous,
and `kvquota.agent.engines.vllm.KvquotaWorker`. With the entry point (see plugin) KVQUOTA=1 alone is enough.
"""

from importlib import import_module

# Imported on first use: vLLM's entry points load this package in every process, also without KVQUOTA.
_HOMES = {"KvquotaScheduler": "scheduler", "KvquotaAsyncScheduler": "scheduler", "KvquotaWorker": "worker"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
