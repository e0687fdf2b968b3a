"""Drive a reference engine in a process of its own, and see what memory it really holds."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from kvquota.agent.engines.reference.engine import Completion


class EngineProcess:
    """An engine that was started, and is spoken to by JSON lines."""

    PROGRAM = ("-m", "kvquota.agent.engines.reference")

    def __init__(
        self,
        options: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: int | IO[Any] | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Start it. `ready` is done once it serves; like every other future it fails when it ends.

        `environment` is added to this process's own. `log`: where stderr goes. `program`: what python runs.
        """
        self.ready = Future[None]()
        self._futures: dict[int, Future[Completion]] = {}
        self._lock = threading.Lock()
        self._started = 0
        self._ended = False
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, *program, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            text=True,
        )
        if self.process.stdin is None or self.process.stdout is None:
            raise AssertionError("Popen made no pipes")
        self._input, self._output = self.process.stdin, self.process.stdout
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, name="engine output", daemon=True)
        self._reader.start()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Future[Completion]:
        """Queue a prompt. The future raises RuntimeError where the engine refuses it, or ends."""
        future = Future[Completion]()
        message = {"prompt": list(prompt), "max_tokens": max_tokens}
        with self._lock:
            if self._ended:
                raise RuntimeError(f"the engine process {self.pid} has ended")
            self._started += 1
            self._futures[self._started] = future
            self._write(json.dumps({"id": self._started, **message}) + "\n")
        return future

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout: float = 60.0
    ) -> list[Completion]:
        """Serve prompts together and wait for all of them, each at most `timeout` seconds."""
        futures = [self.submit(prompt, max_tokens) for prompt in prompts]
        return [future.result(timeout) for future in futures]

    def stop(self, timeout: float = 20.0) -> int:
        """End it by ending its input; SIGKILL after `timeout` seconds. Returns the exit status."""
        self._close_input()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self._join()

    def kill(self) -> int:
        """SIGKILL it."""
        self.process.kill()
        return self._join()

    def _join(self) -> int:
        status = self.process.wait()
        self._close_input()
        self._reader.join()
        return status

    def _close_input(self) -> None:
        with self._lock, suppress(BrokenPipeError):
            self._input.close()

    def _write(self, line: str) -> None:
        try:
            self._input.write(line)
            self._input.flush()
        except OSError as error:
            raise RuntimeError(f"the engine process {self.pid} does not listen: {error}") from error

    def _read(self) -> None:
        with self._output:
            for line in self._output:
                self._take(json.loads(line))
        gone = RuntimeError(f"the engine process {self.pid} ended with status {self.process.wait()}")
        with self._lock:
            self._ended = True
            open_futures: list[Future[Any]] = [*self._futures.values()]
        if not self.ready.done():
            open_futures.append(self.ready)
        for future in open_futures:
            future.set_exception(gone)

    def _take(self, message: dict[str, Any]) -> None:
        if message.pop("ready", False):
            self.ready.set_result(None)
            return
        with self._lock:
            future = self._futures.pop(message.pop("id"))
        if "error" in message:
            future.set_exception(RuntimeError(message["error"]))
        else:
            future.set_result(Completion(**message))


def memfd_bytes(pid: int) -> int:
    """Physical memory behind the KV memfds of a process, as the kernel counts it."""
    found = {}
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(descriptor.path).startswith("/memfd:kvquota-granules"):
                status = os.stat(descriptor.path)
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())
