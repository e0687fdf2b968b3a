"""A real vLLM on CPU for tests: forked from a process that has imported it, in a session of its own.

A start by spawn takes 18 seconds, most of it imports. Here one process imports vLLM once, and every engine,
its EngineCore and its workers are forked from it: 2 to 3 seconds.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.session import granule_bytes, pids_of

START_TIMEOUT = 90.0
REPLY_TIMEOUT = 90.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": True,
    "block_size": 32,
}


@dataclass(frozen=True)
class Reply:
    """What one request came to."""

    tokens: list[int]
    cached: int


class EngineError(RuntimeError):
    """The engine did not start, or a call in it failed; the message has the engine's traceback."""


class Engine:
    """One running vLLM: API side, EngineCore and worker, all in the session `pid`."""

    def __init__(self, model: Path, environment: Mapping[str, str], **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.vllm_imports"])
        self._connection, theirs = context.Pipe()
        merged = {**_OPTIONS, **options, "model": str(model)}
        self._process = context.Process(
            target=_serve, args=(theirs, {**ENVIRONMENT, **environment}, merged), name="vllm"
        )
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._next = 0
        assert self._process.pid is not None
        self.pid = self._process.pid
        try:
            ready = self._connection.poll(START_TIMEOUT) and self._connection.recv()
        except EOFError:
            ready = None
        if ready is not True:
            self.kill()
            raise EngineError(f"vLLM did not start within {START_TIMEOUT} s: {ready or 'it ended'}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while True:
                number, result, error = self._connection.recv()
                future = self._calls.pop(number)
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(EngineError(error))
        except (EOFError, OSError):
            for future in self._calls.values():
                future.set_exception(EngineError("the engine has gone"))

    def submit(self, name: str, *args: Any) -> "Future[Any]":
        """Call `name` of the engine's side (see _Server) without waiting."""
        future: Future[Any] = Future()
        with self._lock:
            self._next += 1
            self._calls[self._next] = future
            self._connection.send((self._next, name, args))
        return future

    def request(
        self, prompt: Sequence[int], max_tokens: int = 8, patience: float | None = None
    ) -> "Future[Reply]":
        """Start one greedy request. After `patience` seconds its client hangs up with what it has."""
        return self.submit("generate", list(prompt), max_tokens, patience)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[Reply]:
        """Greedy answers to `prompts`, all in flight at once."""
        futures = [self.request(prompt, max_tokens) for prompt in prompts]
        return [future.result(REPLY_TIMEOUT) for future in futures]

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of vLLM's AsyncLLM."""
        return self.submit("call", name, args, options).result(REPLY_TIMEOUT)

    def check_blocks(self) -> list[str]:
        """What is wrong with the books of an elastic engine's blocks, now."""
        faults: list[str] = self.submit("utility", "check_blocks").result(REPLY_TIMEOUT)
        return faults

    def check_books(self) -> list[str]:
        """What is wrong with those of blocks and of pages, once it is at rest and its limit settled."""
        faults: list[str] = self.submit("utility", "check_books").result(REPLY_TIMEOUT)
        return faults

    def pids(self) -> list[int]:
        """Every process of the engine's session that runs."""
        return pids_of(self.pid)

    def kv_bytes(self) -> int:
        """Physical bytes behind the KV cache: what the memfds of our granules hold."""
        return granule_bytes(self.pids())

    def cpu_seconds(self) -> float:
        """User and system time of the engine's processes."""
        ticks = 0
        for pid in self.pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> bool:
        """End the engine as its user would, then make sure that nothing of it is left.

        Whether it had ended by itself within 30 s.
        """
        if self._process.is_alive():
            with suppress(OSError):
                self._connection.send(None)
            self._process.join(30)
        ended = not self.pids()
        self.kill()
        return ended

    def kill(self) -> None:
        """SIGKILL every process of the session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(10)
        self._connection.close()


@contextmanager
def engine(model: Path, environment: Mapping[str, str], **options: Any) -> Iterator[Engine]:
    """An engine for the length of a with block."""
    running = Engine(model, environment, **options)
    try:
        yield running
    finally:
        running.close()


# What follows runs in the engine's processes.


def _serve(connection: Connection, environment: dict[str, str], options: dict[str, Any]) -> None:
    os.setsid()
    for name in [name for name in os.environ if name.startswith("KVQUOTA")]:
        del os.environ[name]
    os.environ.update(environment)
    try:
        asyncio.run(_main(connection, options))
    except BaseException:
        with suppress(OSError):
            connection.send(traceback.format_exc())
        raise


async def _main(connection: Connection, options: dict[str, Any]) -> None:
    from tests.support.vllm_platform import use_fork

    # It imports kvquota, which an engine without it must know nothing of.
    if "KVQUOTA" in os.environ:
        from tests.support import vllm_books

        vllm_books.install()
    use_fork(asynchronous=options.pop("async_scheduling", False))
    if fail_map := options.pop("fail_map", 0):
        _fail_maps_from(fail_map)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    loop = asyncio.get_running_loop()
    server = _Server(llm)
    connection.send(True)
    tasks = set()
    try:
        while (message := await loop.run_in_executor(None, _receive, connection)) is not None:
            number, name, args = message
            task = loop.create_task(_answer(connection, number, getattr(server, name)(*args)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        llm.shutdown()


def _fail_maps_from(call: int) -> None:
    """Every mem_map of the ranks fails, from this one on, as a broken driver's would."""
    from kvquota.agent.engines.vllm import buffer
    from kvquota.native import Arena, Driver, FaultDriver

    def arena(driver: Driver, *args: Any) -> Arena:
        faulty = FaultDriver(driver)
        faulty.fail("mem_map", nth=call, times=1 << 30)
        return Arena(faulty, *args)

    setattr(buffer, "Arena", arena)  # noqa: B010


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


async def _answer(connection: Connection, number: int, call: Any) -> None:
    try:
        connection.send((number, await call, None))
    except Exception:
        connection.send((number, None, traceback.format_exc()))


class _Server:
    """What a test can have done on the API side of an engine."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._requests = 0

    async def generate(self, prompt: list[int], max_tokens: int, patience: float | None) -> Reply:
        from vllm import SamplingParams

        self._requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True)
        stream = self._llm.generate({"prompt_token_ids": prompt}, params, f"r{self._requests}")
        reply = Reply([], 0)

        async def listen() -> None:
            nonlocal reply
            async for output in stream:
                reply = Reply(list(output.outputs[0].token_ids), output.num_cached_tokens or 0)

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(listen(), patience)
        return reply

    async def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return await getattr(self._llm, name)(*args, **options)

    async def utility(self, name: str) -> Any:
        return await self._llm.engine_core.call_utility_async(name)
