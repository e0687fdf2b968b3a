"""vLLM's own engine core with our agent in it, and no model: a test says what credits come, and when.

Its loop, its scheduler and its block pool are the real ones. The token of every request and step is 7.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kvquota.agent.contract import PageCommand, RankFault
from kvquota.native import PageQueue

from tests.agent.fake_daemon import FakeDaemon
from tests.agent.model import ModelRank
from tests.support.vllm_pages import BLOCK_BYTES, BLOCK_TOKENS, PAGE_BYTES, SHAPE

PAGE_BLOCKS = PAGE_BYTES // BLOCK_BYTES
TIMEOUT = 20.0
_PACKAGE = "kvquota.agent.engines.vllm"


class HeldRank(ModelRank):
    """A model rank that a watcher can poll. While `held`, nothing comes before the test says so."""

    def __init__(self) -> None:
        super().__init__(page_bytes=PAGE_BYTES, asked=1)
        self.held = False
        self._ring = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.create()

    def ask(self, asked: int, dropped: int) -> None:
        super().ask(asked, dropped)
        if not self.held:
            self.serve()

    def serve(self) -> None:
        """Do all that was asked for."""
        self.serve_drops()
        self.create()

    def create(self, count: int | None = None) -> None:
        super().create(count)
        os.eventfd_write(self._ring, 1)

    def refuse(self) -> None:
        super().refuse()
        os.eventfd_write(self._ring, 1)

    def finish(self, command: PageCommand, *faults: RankFault) -> None:
        super().finish(command, *faults)
        os.eventfd_write(self._ring, 1)

    def wait(self, created: int, timeout: float) -> None:
        """What is held does not come while it is waited for."""

    def attach(self, record_fd: int) -> None:
        """It takes no memory."""

    def fileno(self) -> int:
        return self._ring

    def ready(self) -> bool:
        os.eventfd_read(self._ring)
        return True


class Core:
    """An engine core over `pages` pages: it makes the steps that a test asks for, or runs its own loop."""

    def __init__(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, pages: int, asynchronous: bool = False
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

        self.steps = 0
        self.stepped = threading.Condition()
        self.rank = rank = HeldRank()
        socket = checkpoint / "agent.sock"
        self.daemon = FakeDaemon(socket)
        monkeypatch.setenv("KVQUOTA", "1")
        monkeypatch.setenv("KVQUOTA_AGENT_SOCKET", str(socket))
        monkeypatch.setenv("KVQUOTA_RESERVE_BYTES", "0")
        monkeypatch.setattr(
            "kvquota.agent.engines.vllm.scheduler.RemoteRank", lambda *_args, **_options: rank
        )

        class WithoutSockets(EngineCoreProc):  # type: ignore[misc]
            def __init__(self, config: Any, executor: Callable[[Any], Any]) -> None:
                self.input_queue: queue.Queue[Any] = queue.Queue()
                self.output_queue: queue.Queue[Any] = queue.Queue()
                self.shutdown_state = EngineShutdownState.RUNNING
                self.process_input_queue_block = True
                self.engines_running = self.enable_fault_tolerance = self.publish_dp_lb_stats = False
                EngineCore.__init__(self, config, executor, log_stats=True)

        merged = {
            "model": str(checkpoint),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": pages * PAGE_BYTES,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "scheduler_cls": f"{_PACKAGE}.Kvquota{'Async' if asynchronous else ''}Scheduler",
            "worker_cls": f"{_PACKAGE}.KvquotaWorker",
        }
        config = EngineArgs(**merged).create_engine_config()
        # The CPU platform has turned it off.
        config.scheduler_config.async_scheduling = asynchronous
        self.engine: Any = WithoutSockets(config, lambda _config: _NoModel(self, pages * PAGE_BYTES))
        self.scheduler = self.engine.scheduler
        self.connection = self.daemon.connection()
        self._revision = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def request(self, name: str, prompt: list[int], max_tokens: int = 1, **options: Any) -> Any:
        """A request of vLLM's, not yet added."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)
        return Request(name, prompt, params, None, block_hasher=self.engine.request_block_hasher)

    def send(self, kind: str, message: Any) -> None:
        """Put a message of that kind in the input queue, as the thread does that reads the socket."""
        from vllm.v1.engine import EngineCoreRequestType

        self.engine.input_queue.put_nowait((getattr(EngineCoreRequestType, kind), message))

    def limit(self, pages: int | None) -> None:
        self._revision += 1
        self.connection.limit(None if pages is None else pages * PAGE_BYTES, self._revision)

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, **options: Any) -> Any:
        """Add a request at once, between steps."""
        request = self.request(name, prompt, max_tokens, **options)
        self.engine.add_request(request)
        return request

    def step(self) -> None:
        """One step of the engine, where it has work, as its loop makes it."""
        while not self.engine.input_queue.empty():
            self.engine.input_queue.get_nowait()
        # With news, a step that can do nothing returns at once.
        self.send("WAKEUP", None)
        self.engine.step_fn()

    def step_until(self, reached: Callable[[], bool]) -> None:
        for _ in range(1000):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in 1000 steps: {self.scheduler.requests}")

    def until_told(self) -> None:
        """Wait until the watcher has woken the engine."""
        self.engine.input_queue.get(timeout=TIMEOUT)

    @property
    def queue(self) -> PageQueue:
        queue: PageQueue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return queue

    def cached_blocks(self) -> int:
        """Blocks in the prefix cache."""
        return len(self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)

    def hit_blocks(self, prompt: list[int]) -> int:
        """Blocks of `prompt` that the prefix cache has."""
        # The last token of a request is never taken from it.
        new: int = self.scheduler.kv_cache_manager.expect(self.request("hit", [*prompt, 0]))[1]
        return (len(prompt) + 1 - new) // BLOCK_TOKENS

    def pages(self) -> int:
        """Pages in circulation."""
        return sum(self.queue.usage()[:3])

    def start(self) -> None:
        """Have the engine's own loop run."""
        self._thread.start()

    def _run(self) -> None:
        # The loop ends by SystemExit, for the process that it has to itself.
        with suppress(SystemExit):
            self.engine.run_busy_loop()

    def until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait until `reached` after some step of the loop, or while it sleeps."""
        with self.stepped:
            end = time.monotonic() + TIMEOUT
            while not reached():
                assert time.monotonic() < end, f"not in {TIMEOUT} s: {what}"
                self.stepped.wait(0.01)

    def until_asleep(self) -> int:
        """Wait until the loop waits for news, with none on their way. Returns the steps made so far."""
        inputs = self.engine.input_queue
        self.until("the loop sleeps", lambda: bool(inputs.not_empty._waiters) and not inputs.queue)
        return self.steps

    def close(self) -> None:
        from vllm.v1.engine.core import EngineShutdownState

        if self._thread.is_alive():
            self.engine.shutdown_state = EngineShutdownState.REQUESTED
            self.send("WAKEUP", None)
            self._thread.join(TIMEOUT)
            assert not self._thread.is_alive()
        self.scheduler.shutdown()
        self.daemon.close()


class _NoModel:
    """An executor whose workers apply page commands and sample 7."""

    is_sleeping = False
    sleeping_tags: frozenset[str] = frozenset()
    supported_tasks = ("generate",)

    def __init__(self, core: Core, kv_bytes: int) -> None:
        self._core = core
        self._kv_bytes = kv_bytes

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=SHAPE.kv_heads,
            head_size=SHAPE.head_dim,
            dtype=torch.float32,
        )
        return [{f"layers.{layer}": spec for layer in range(SHAPE.layers)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"]]

    def set_kv_cache_layout(self, name: str) -> None:
        assert name == "LBHNC"

    def determine_available_memory(self) -> list[int]:
        return [self._kv_bytes]

    def initialize_from_config(self, configs: Any) -> None:
        assert len(configs) == 1

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(self, *_args: Any, **_options: Any) -> list[None]:
        return [None]

    def execute_model(self, output: Any, **_options: Any) -> Any:
        from kvquota.agent.engines.vllm.layout import COMMAND
        from vllm.v1.outputs import ModelRunnerOutput

        command = getattr(output, COMMAND, None)
        if command is not None:
            self._core.rank.finish(command)
        with self._core.stepped:
            self._core.steps += 1
            self._core.stepped.notify_all()
        requests = self._core.scheduler.requests
        names = list(output.num_scheduled_tokens)
        whole = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if done else [] for done in whole],
        )
        self._sampled: Future[Any] = Future()
        self._sampled.set_result(result)
        return self._sampled

    def sample_tokens(self, _grammar: Any, **_options: Any) -> Any:
        """Of the step that was executed last: asked for where steps overlap."""
        return self._sampled

    def shutdown(self) -> None:
        pass
