"""The engine: one thread that schedules and computes, and sleeps when there is nothing that it could do."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquota.agent.engines.reference.elastic import Elastic
from kvquota.agent.engines.reference.memory import plain_kv
from kvquota.agent.engines.reference.model import Chunk, Qwen3
from kvquota.agent.engines.reference.scheduler import Block, Request, Scheduler
from kvquota.agent.settings import Settings
from kvquota.native import PageQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """What became of a request. `hit_tokens`: tokens of the prompt that came from the prefix cache."""

    tokens: list[int]
    hit_tokens: int
    preemptions: int


class Engine:
    """Serves greedy completions of a Qwen3 checkpoint.

    With `settings` its KV memory is elastic. Without, it is the unmodified engine: ordinary tensors, whole
    from the start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        blocks: int,
        block_tokens: int = 16,
        dtype: str = "float32",
        null_block: bool = False,
        batch_tokens: int = 512,
        max_running: int = 16,
        settings: Settings | None = None,
    ) -> None:
        """Load the model, make the KV cache of `blocks` blocks, start the thread.

        `null_block`: hold block 0 for ever, as engines do that pad their batches with it.
        """
        self._model = Qwen3(directory, dtype)
        pool = [Block(number) for number in range(blocks)]
        self._elastic = Elastic(self._model, blocks, block_tokens, settings) if settings else None
        if self._elastic is None:
            self._kv = plain_kv(self._model, blocks, block_tokens)
            queue = PageQueue(pool, [(0, blocks)])
            queue.put(0)
        else:
            self._kv = self._elastic.kv
            queue = PageQueue(pool, self._elastic.ranges)
            if null_block:
                self._elastic.map_floor()
                queue.put(0)
        self._capacity_tokens = (queue.max_free_blocks - null_block) * block_tokens
        if null_block:
            queue.popleft()
        self._scheduler = Scheduler(queue, block_tokens, batch_tokens=batch_tokens, max_running=max_running)
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._futures: dict[Hashable, Future[Any]] = {}
        self._woken = self._active = self._closed = False
        if self._elastic is not None:
            self._elastic.join(self._scheduler, pool, null_block=null_block, wake=self.wake)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Future[Completion]:
        """Queue a prompt of token ids; any thread. Raises ValueError for one that can never be served."""
        tokens = len(prompt) + max_tokens
        if not prompt or max_tokens < 1 or tokens > self._model.positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens {max_tokens}: expected at least 1 of each, "
                f"and at most {self._model.positions} together"
            )
        if not all(0 <= token < self._model.vocab for token in prompt):
            raise ValueError(f"a token that is not in 0..{self._model.vocab - 1}")
        if tokens > self._capacity_tokens:
            raise ValueError(
                f"{tokens} tokens: all of the KV cache is {self._capacity_tokens}; raise --blocks"
            )
        request, future = Request(list(prompt), max_tokens), Future[Completion]()
        self._post(request, future, lambda: self._scheduler.add(request))
        return future

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout: float = 60.0
    ) -> list[Completion]:
        """Serve prompts together and wait for all of them. Raises TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        futures = [self.submit(prompt, max_tokens) for prompt in prompts]
        return [future.result(deadline - time.monotonic()) for future in futures]

    def reset_prefix_cache(self, timeout: float = 10.0) -> None:
        """Forget what is cached. Raises RuntimeError while requests are there; `timeout`: seconds."""
        self._between_steps(self._reset, timeout)

    def sleep(self, timeout: float = 10.0) -> None:
        """Forget what is cached and give all KV memory back; requests wait until wake_up().

        Raises RuntimeError while requests are there, and where memory is not elastic; `timeout`: seconds.
        """
        elastic = self._elastic
        if elastic is None:
            raise RuntimeError("the KV cache is not elastic: its memory cannot be given back")

        def sleep() -> None:
            self._reset()
            elastic.suspend()

        self._between_steps(sleep, timeout)

    def wake_up(self, timeout: float = 10.0) -> None:
        """End the sleep: what waits is served as memory comes; `timeout`: seconds."""
        if self._elastic is not None:
            self._between_steps(self._elastic.resume, timeout)

    def wake(self) -> None:
        """Make the engine thread look at its agent soon; any thread."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        """Stop, cancel what is not finished and give all KV memory back. May be called twice."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()
        self._kv.clear()
        if self._elastic is not None:
            self._elastic.close()

    def _reset(self) -> None:
        if self._scheduler.busy:
            raise RuntimeError("requests run or wait: the prefix cache cannot be reset")
        self._scheduler.reset()

    def _between_steps(self, job: Callable[[], None], timeout: float) -> None:
        """Have the engine thread do `job`; returns once it is done. Raises what it raises."""
        future = Future[None]()

        def attempt() -> None:
            try:
                job()
            except RuntimeError as error:
                self._futures.pop(future).set_exception(error)
            else:
                self._futures.pop(future).set_result(None)

        self._post(future, future, attempt)
        future.result(timeout)

    def _post(self, key: Hashable, future: Future[Any], job: Callable[[], None]) -> None:
        """Have the engine thread do `job` before its next step, which settles `future`."""
        future.set_running_or_notify_cancel()
        with self._condition:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._futures[key] = future
            self._inbox.append(job)
            self._condition.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._active = self._step()
        except Exception as error:
            logger.exception("the engine thread ends")
            self._fail(error)
        else:
            self._fail(RuntimeError("the engine was closed"))

    def _wait(self) -> bool:
        """Until there may be something to do. False when the engine is to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._inbox or self._woken or self._active)
            self._woken = False
            jobs, self._inbox = self._inbox, []
            closed = self._closed
        for job in jobs:
            job()
        return not closed

    def _step(self) -> bool:
        """One step, if there is something to do. Returns whether another may do more."""
        elastic = self._elastic
        if elastic is not None:
            if not self._scheduler.busy and not elastic.wants_step():
                return False
            elastic.agent.begin_step()
        work = self._scheduler.schedule()
        if elastic is not None:
            elastic.apply(elastic.agent.end_step())
            work = [(request, count) for request, count in work if request.blocks]
        if work:
            chunks = [
                Chunk(
                    request.tokens[request.computed : request.computed + count],
                    request.computed,
                    [block.block_id for block in request.blocks],
                )
                for request, count in work
            ]
            for request in self._scheduler.update(work, self._model.forward(chunks, self._kv)):
                completion = Completion(request.output, request.hit_tokens, request.preemptions)
                self._futures.pop(request).set_result(completion)
        return bool(work) or (elastic is not None and elastic.agent.needs_step)

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._closed = True
            futures = list(self._futures.values())
        for future in futures:
            future.set_exception(error)
