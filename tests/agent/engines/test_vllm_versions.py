"""What is refused before anything of vLLM is replaced, and how it is said."""

import importlib
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kvquota.agent.settings import SettingError

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]

PACKAGE = "kvquota.agent.engines.vllm"
NAMES = ["KvquotaScheduler", "KvquotaAsyncScheduler", "KvquotaWorker"]


def config(scheduler: str = "KvquotaScheduler", worker: str = f"{PACKAGE}.KvquotaWorker", **more: Any) -> Any:
    """As much of a VllmConfig as the check looks at."""

    def scheduler_cls() -> type:
        found: type = getattr(importlib.import_module(f"{PACKAGE}.scheduler"), scheduler)
        return found

    fields: dict[str, Any] = {
        "scheduler_config": SimpleNamespace(get_scheduler_cls=scheduler_cls),
        "parallel_config": SimpleNamespace(worker_cls=worker),
        "kv_transfer_config": None,
        "attention_config": SimpleNamespace(hisparse_config=None),
    }
    return SimpleNamespace(**{**fields, **more})


def check(*args: Any, **kwargs: Any) -> None:
    from kvquota.agent.engines.vllm import versions

    versions.check()
    versions.check_config(config(*args, **kwargs))


def test_the_installed_vllm_fits() -> None:
    check()
    check(scheduler="KvquotaAsyncScheduler")


def test_one_class_without_the_other_is_refused_with_the_flag_that_lacks() -> None:
    with pytest.raises(SettingError, match=r"the worker is vllm\.CPUWorker: give --worker-cls kvquota"):
        check(worker="vllm.CPUWorker")
    with pytest.raises(SettingError, match="the scheduler is AsyncScheduler: give --scheduler-cls kvquota"):
        check(scheduler="AsyncScheduler")


def test_what_touches_pages_outside_of_steps_is_refused() -> None:
    with pytest.raises(SettingError, match="--kv-transfer-config"):
        check(kv_transfer_config=object())


@pytest.mark.parametrize("version", ["0.24.0", "0.31.2", "0.33.0rc1", "1.30.0"])
def test_an_unknown_version_is_refused_with_those_that_are_known(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquota.agent.engines.vllm.plugin import register

    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setenv("KVQUOTA", "1")
    refused = rf"vLLM {re.escape(version)} is not known .* one of 0\.30, 0\.32; set KVQUOTA=0 to run without"
    with pytest.raises(SettingError, match=refused):
        register()
    for name in NAMES:
        with pytest.raises(SettingError, match=refused):
            getattr(importlib.import_module(PACKAGE), name)


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0"])
def test_without_kvquota_the_flags_name_vllms_own_classes(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setattr("vllm.__version__", version)
    package = importlib.import_module(PACKAGE)
    for value in (None, "0"):
        if value is None:
            monkeypatch.delenv("KVQUOTA", raising=False)
        else:
            monkeypatch.setenv("KVQUOTA", value)
        assert [getattr(package, name) for name in NAMES] == [Scheduler, AsyncScheduler, CPUWorker]


def test_a_seam_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "_maybe_evict_cached_block")
    with pytest.raises(SettingError, match=r"evicted through BlockPool\._maybe_evict_cached_block"):
        check()


def test_a_seam_of_instances_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def __init__(self: Any) -> None:  # noqa: N807
        self.running = []

    monkeypatch.setattr(Scheduler, "__init__", __init__)
    with pytest.raises(
        SettingError, match=r"looked at through Scheduler\.requests, which it lacks"
    ) as caught:
        check()
    assert "Scheduler.running" not in str(caught.value)


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", None)
    with pytest.raises(SettingError, match=r"told by KVCacheLayout\.is_block_compact"):
        check()


def test_a_call_of_the_free_list_that_ours_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    monkeypatch.setattr(FreeKVCacheBlockQueue, "popright", FreeKVCacheBlockQueue.popleft, raising=False)
    with pytest.raises(SettingError, match="its free list has popright, which PageQueue lacks"):
        check()


def test_without_kvquota_the_plugin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquota.agent.engines.vllm.plugin import register
    from vllm.config import SchedulerConfig
    from vllm.platforms import current_platform

    before = SchedulerConfig.get_scheduler_cls, current_platform.check_and_update_config
    for value in (None, "", "0"):
        if value is None:
            monkeypatch.delenv("KVQUOTA", raising=False)
        else:
            monkeypatch.setenv("KVQUOTA", value)
        register()
    assert (SchedulerConfig.get_scheduler_cls, current_platform.check_and_update_config) == before


def test_a_bad_setting_stops_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquota.agent.engines.vllm.plugin import register

    monkeypatch.setenv("KVQUOTA", "yes")
    with pytest.raises(SettingError, match="KVQUOTA is 'yes'"):
        register()
