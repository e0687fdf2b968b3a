"""The engines that the demo can show, each behind the same few methods."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvquota.agent.engines.reference.checkpoint import write_checkpoint
from kvquota.agent.engines.reference.process import EngineProcess, memfd_bytes

from deploy.demo.stage import Stage


class DemoEngine(Protocol):
    """A running engine, over a tiny model that it generates in the stage's folder."""

    title: str

    def __init__(self, stage: Stage, environment: dict[str, str]) -> None:
        """Start it, and return once it serves. Elastic by `environment`; unmodified where that is empty."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], int]:
        """Serve prompts together: the greedy tokens of each, and how many prompt tokens the cache served."""

    def memfd_bytes(self) -> int:
        """Physical memory behind its KV cache, as the kernel counts it."""

    def stop(self) -> None:
        """End it. Raises RuntimeError where it does not end well."""


class ReferenceEngine:
    """The reference engine. One of its pages holds 4,096 tokens."""

    title = "the reference engine serving a tiny Qwen3"

    def __init__(self, stage: Stage, environment: dict[str, str]) -> None:
        model = stage.folder / "model"
        if not model.exists():
            write_checkpoint(model)
        options = ["--model", str(model), "--blocks", "4096"]
        self._process = EngineProcess(options, environment=environment, log=stage.log)
        self._process.ready.result(60)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], int]:
        """Serve prompts together."""
        completions = self._process.generate(prompts, max_tokens)
        return [c.tokens for c in completions], sum(c.hit_tokens for c in completions)

    def memfd_bytes(self) -> int:
        """Of its one process."""
        return memfd_bytes(self._process.pid)

    def stop(self) -> None:
        """End its input."""
        status = self._process.stop()
        if status:
            raise RuntimeError(f"the engine ended with status {status}")


class VllmEngine:
    """vLLM on CPU, as a user starts it: KVQUOTA=1 is all that makes it elastic. A page holds 2,048 tokens."""

    title = "vLLM on CPU serving a tiny Qwen3"

    def __init__(self, stage: Stage, environment: dict[str, str]) -> None:
        model = stage.folder / "model"
        if not model.exists():
            write_checkpoint(model)
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.demo.vllm_process", str(model)],
            env={**os.environ, **quiet, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stage.log,
            text=True,
            start_new_session=True,
        )
        if self._answer() != "ready":
            raise RuntimeError("vLLM did not start")

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], int]:
        """Serve prompts together."""
        if self._process.stdin is None:
            raise RuntimeError("vLLM has ended")
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        tokens, hits = json.loads(self._answer())
        return tokens, hits

    def memfd_bytes(self) -> int:
        """Of its worker, which is one of the processes of its session."""
        session = self._process.pid
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return sum(memfd_bytes(pid) for pid in pids if _session(pid) == session)

    def stop(self) -> None:
        """End its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        status = self._process.wait(60)
        if status:
            raise RuntimeError(f"vLLM ended with status {status}")

    def _answer(self) -> str:
        if self._process.stdout is None or not (line := self._process.stdout.readline()):
            raise RuntimeError(f"vLLM ended with status {self._process.wait(60)}")
        return line.strip()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


ENGINES: dict[str, type[DemoEngine]] = {"reference": ReferenceEngine, "vllm": VllmEngine}
