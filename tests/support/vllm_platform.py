"""vLLM's CPU platform, but with fork, and with asynchronous scheduling where a test wants it."""

import os

import vllm.platforms
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms.cpu import CpuPlatform


def use_fork(*, asynchronous: bool) -> None:
    """Make it the platform of this process and of those forked from it."""

    class ForkingCpuPlatform(CpuPlatform):
        @classmethod
        def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
            super().check_and_update_config(vllm_config)
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            vllm_config.scheduler_config.async_scheduling = asynchronous

    vllm.platforms._current_platform = ForkingCpuPlatform()
    # vLLM's processes spin for a second after each message: on two cores they take them from each other.
    SpinCondition.__init__.__defaults__ = (0.001,)
