"""What kvquota needs of vLLM: one clear error and no start where a version or a configuration lacks it.

Imports nothing of an engine: it must be able to say that a version does not fit.
"""

import functools
import inspect
from collections.abc import Iterable
from itertools import chain
from pkgutil import resolve_name
from typing import Any

import vllm
from kvquota.agent.settings import SettingError

_PACKAGE = "kvquota.agent.engines.vllm."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_FREE_LIST = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_TYPE_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

# What a seam is for, whose it is, and the names that it needs there.
_SEAMS: list[tuple[str, str, tuple[str, ...]]] = [
    (
        "page commands ride on",
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("__dict__", "total_num_scheduled_tokens", "finished_req_ids"),
    ),
    ("an idle engine is woken by", "vllm.v1.engine:EngineCoreRequestType", ("WAKEUP",)),
    ("an idle engine is woken through", "vllm.v1.engine.core:EngineCoreProc", ("input_queue",)),
    ("a loop that admits nothing rests while", "vllm.v1.engine.core:EngineCore", ("batch_queue",)),
    ("a sleeping KV cache is told by", "vllm.v1.executor.abstract:Executor", ("sleeping_tags",)),
    ("what puts it to sleep waits in", "vllm.v1.engine.core:EngineCore", ("_idle_state_callbacks",)),
    ("an ending engine is told by", "vllm.v1.engine.core:EngineShutdownState", ("SHUTTING_DOWN",)),
    ("steps are made by", _SCHEDULER, ("schedule", "has_requests", "shutdown", "get_request_counts")),
    (
        "requests are looked at through",
        _SCHEDULER,
        ("requests", "running", "waiting", "deferred_frees", "connector", "ec_connector", "pause_state"),
    ),
    ("growth is asked for by", _SCHEDULER, ("_inflight_prefills", "max_num_running_reqs")),
    (
        "blocks are evicted through",
        _POOL,
        ("_maybe_evict_cached_block", "_notify_reuse", "_reuse_watchers"),
    ),
    ("blocks are cached through", _POOL, ("cache_full_blocks", "cache_partial_block", "move_block_hashes")),
    ("blocks are handed out from", _POOL, ("blocks", "null_block", "free_block_queue", "num_gpu_blocks")),
    ("free blocks are listed by", _FREE_LIST, ("popleft_n", "num_free_blocks")),
    (
        "blocks are allocated by",
        _MANAGER,
        ("allocate_slots", "block_pool", "coordinator", "watermark_blocks", "enable_caching"),
    ),
    (
        "blocks are allocated by",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        ("single_type_managers", "find_longest_cache_hit"),
    ),
    ("a request's hits are found by", "vllm.v1.request:Request", ("block_hashes",)),
    ("the watermark is told by", "vllm.config:SchedulerConfig", ("watermark",)),
    (
        "the KV buffer is placed by",
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        ("size", "layers", "layer_stride", "block_stride", "offset", "host_resident"),
    ),
    (
        "the KV buffer's order is told by",
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        ("kv_cache_layout", "num_blocks", "kv_cache_tensors"),
    ),
    (
        "the KV buffer's order is told by",
        "vllm.v1.kv_cache_layout:KVCacheLayout",
        ("is_block_compact", "is_block_outermost"),
    ),
    (
        "the KV buffer is allocated by",
        "vllm.v1.worker.cpu_worker:CPUWorker",
        ("_maybe_get_memory_pool_context", "initialize_from_config", "execute_model", "shutdown"),
    ),
]

# What differs. Waiting requests that are looked at before those in `waiting`, are in:
_LOOKED_AT_FIRST = {"0.30": "skipped_waiting", "0.32": "kv_holding_waiting"}
# Where a window slides, the most blocks that a request needs, as its manager knows it:
_MOST_BLOCKS = {"0.30": "_max_admission_blocks_per_request", "0.32": "max_admission_blocks_per_request"}


def known() -> str:
    """The installed version, MAJOR.MINOR. Raises SettingError for one that this kvquota does not know."""
    return _known(vllm.__version__)


@functools.cache
def _known(installed: str) -> str:
    # Cached: every allocation asks.
    version = ".".join(installed.split(".")[:2])
    if version not in _LOOKED_AT_FIRST:
        raise SettingError(
            f"vLLM {installed} is not known to this kvquota: expected one of "
            f"{', '.join(_LOOKED_AT_FIRST)}; set KVQUOTA=0 to run without elastic memory"
        )
    return version


def in_order(scheduler: Any) -> Iterable[Any]:
    """The waiting requests of a vLLM scheduler, in the order in which it looks at them."""
    return chain(getattr(scheduler, _LOOKED_AT_FIRST[known()]), scheduler.waiting)


def most_blocks(manager: Any) -> int | None:
    """What a request needs at most of a vLLM manager of one type of KV cache; None: that has no end."""
    most: int | None = getattr(manager, _MOST_BLOCKS[known()])
    return most


def check() -> None:
    """Raises SettingError, naming the seams that the installed version lacks."""
    differing = [
        ("requests are looked at first in", _SCHEDULER, (_LOOKED_AT_FIRST[known()],)),
        ("what a window holds is told by", _TYPE_MANAGER, (_MOST_BLOCKS[known()], "req_to_blocks")),
    ]
    problems = [
        f"{purpose} {owner.partition(':')[2]}.{name}, which it lacks"
        for purpose, owner, names in (*_SEAMS, *differing)
        for name in _lacking(owner, names)
    ]
    calls = [name for name in dir(_find(_FREE_LIST)) if not name.startswith("_")]
    unmet = _lacking("kvquota.native:PageQueue", calls)
    _refuse(problems + [f"its free list has {name}, which PageQueue lacks" for name in unmet])


def check_config(config: Any) -> None:
    """Raises SettingError, naming what of a VllmConfig does not fit and what to do."""
    from vllm.platforms import current_platform

    problems = []
    if not current_platform.is_cpu():
        problems.append(f"the platform is {current_platform.device_name}: expected cpu")
    if config.kv_transfer_config is not None:
        problems.append("--kv-transfer-config is set: transfers touch pages outside of steps; unset it")
    if config.attention_config.hisparse_config is not None:
        problems.append("HiSparse is on: it keeps blocks in a pool of its own; turn it off")
    scheduler = config.scheduler_config.get_scheduler_cls()
    if not scheduler.__module__.startswith(_PACKAGE):
        problems.append(
            f"the scheduler is {scheduler.__qualname__}: give --scheduler-cls {_PACKAGE}KvquotaScheduler"
        )
    worker = str(config.parallel_config.worker_cls)
    if not worker.startswith(_PACKAGE):
        problems.append(f"the worker is {worker}: give --worker-cls {_PACKAGE}KvquotaWorker")
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise SettingError(
            f"vLLM {vllm.__version__} cannot run with kvquota: {'; '.join(problems)}; "
            "or set KVQUOTA=0 to run without elastic memory"
        )


def _lacking(owner: str, names: Iterable[str]) -> list[str]:
    cls = _find(owner)
    # What only its instances have is named by its constructor.
    init = inspect.unwrap(getattr(cls, "__init__", object))
    made = {
        *getattr(cls, "__annotations__", ()),
        *(init.__code__.co_names if inspect.isfunction(init) else ()),
    }
    return [name for name in names if not hasattr(cls, name) and name not in made]


def _find(owner: str) -> Any:
    try:
        return resolve_name(owner)
    except (ImportError, AttributeError):
        return None
