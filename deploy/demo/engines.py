"""The engines that the demo can show, each behind the same few methods."""

from collections.abc import Sequence
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


ENGINES: dict[str, type[DemoEngine]] = {"reference": ReferenceEngine}
