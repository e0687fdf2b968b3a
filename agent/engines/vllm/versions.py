"""What kvquota needs of vLLM: one clear error and no start where a version or a configuration lacks it."""

from typing import Any

import vllm
from kvquota.agent.settings import SettingError
from kvquota.native import PageQueue
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.worker.gpu_worker import Worker

KNOWN = ("0.32",)
_PACKAGE = "kvquota.agent.engines.vllm."
_SCHEDULER = f"{_PACKAGE}KvquotaScheduler"
_WORKER = f"{_PACKAGE}KvquotaWorker"

# Seam: what it needs, and of which class.
_SEAMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "page commands ride on": (SchedulerOutput, ("__dict__", "total_num_scheduled_tokens")),
    "an idle engine is woken by": (EngineCoreRequestType, ("WAKEUP",)),
    "steps are made by": (Scheduler, ("schedule", "has_requests", "shutdown")),
    "blocks are evicted through": (
        BlockPool,
        ("_maybe_evict_cached_block", "_notify_reuse", "cache_full_blocks"),
    ),
    "blocks are allocated by": (KVCacheManager, ("allocate_slots",)),
    "the KV buffer is placed by": (
        KVCacheTensor,
        ("size", "layers", "layer_stride", "block_stride", "offset"),
    ),
    "the KV buffer's order is told by": (
        KVCacheConfig,
        ("kv_cache_layout", "num_blocks", "kv_cache_tensors"),
    ),
    "the KV buffer is allocated by": (Worker, ("_maybe_get_memory_pool_context", "initialize_from_config")),
}


def check(config: VllmConfig) -> None:
    """Raises SettingError, naming what does not fit and what to do."""
    version = ".".join(vllm.__version__.split(".")[:2])
    if version not in KNOWN:
        raise SettingError(
            f"vLLM {vllm.__version__} is not known to this kvquota: expected one of {', '.join(KNOWN)}; "
            "unset KVQUOTA to run without elastic memory"
        )
    problems = [*_missing(), *_unfit(config)]
    if problems:
        raise SettingError(f"vLLM {vllm.__version__} cannot run with kvquota: {'; '.join(problems)}")


def _missing() -> list[str]:
    problems = [
        f"{seam} {owner.__name__}.{name}, which it lacks"
        for seam, (owner, names) in _SEAMS.items()
        for name in names
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", ())
    ]
    calls = [name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")]
    unmet = [name for name in calls if not hasattr(PageQueue, name)]
    return problems + [f"its free list has {name}, which PageQueue lacks" for name in unmet]


def _unfit(config: VllmConfig) -> list[str]:
    problems = []
    if not current_platform.is_cpu():
        problems.append(f"the platform is {current_platform.device_name}: expected cpu")
    if config.kv_transfer_config is not None:
        problems.append("--kv-transfer-config is set: transfers touch pages outside of steps; unset it")
    if config.attention_config.hisparse_config is not None:
        problems.append("HiSparse is on: it keeps blocks in a pool of its own; turn it off")
    scheduler = config.scheduler_config.get_scheduler_cls()
    if not scheduler.__module__.startswith(_PACKAGE):
        problems.append(f"the scheduler is {scheduler.__qualname__}: give --scheduler-cls {_SCHEDULER}")
    worker = str(config.parallel_config.worker_cls)
    if not worker.startswith(_PACKAGE):
        problems.append(f"the worker is {worker}: give --worker-cls {_WORKER}")
    return problems
