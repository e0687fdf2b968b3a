"""The real `vllm serve` for tests: its processes are a session of their own; and a client for it."""

import http.client
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.daemon import until
from tests.support.session import granule_bytes, pids_of
from tests.support.vllm import ENVIRONMENT
from tests.support.vllm_pages import BLOCK_BYTES, BLOCK_TOKENS

START_TIMEOUT = 90.0
SPAWN_TIMEOUT = 300.0
REPLY_TIMEOUT = 60.0
MODEL = "tiny"
_QUIET = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_LOGGING_LEVEL"}


class Server:
    """One server: API process, EngineCore and worker. `folder` takes its log and its temporary files."""

    def __init__(
        self, model: Path, environment: Mapping[str, str], folder: Path, blocks: int, *, forked: bool = True
    ) -> None:
        """Start it, and return once it is healthy.

        `forked`: from a process that has imported vLLM, and so are its own processes. Spawned ones, as vLLM's
        command has them, import it again and take 25 seconds in place of 3.
        """
        self._log = folder / "log"
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self.port = _free_port()
        arguments = _arguments(model, self.port, blocks)
        own = {
            **_QUIET,
            **environment,
            "TMPDIR": str(self._temporary),
            "VLLM_RPC_BASE_PATH": str(self._temporary),
            "PYTHONPATH": str(_metadata_of_vllm(folder)),
        }
        start = _fork if forked else _execute
        self._process = start(arguments, own, self._log)
        assert self._process.pid is not None
        self.pid = self._process.pid
        try:
            until("the server is healthy", self._ready, START_TIMEOUT if forked else SPAWN_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> str:
        """What its processes have written to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def left_files(self) -> list[Path]:
        """Temporary files of its processes."""
        return list(self._temporary.rglob("*"))

    def get(self, path: str) -> int:
        """The status of the answer to GET `path`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REPLY_TIMEOUT)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def request(self, prompt: Sequence[int], max_tokens: int, *, stream: bool = False) -> "Request":
        """Ask for a completion, and do not wait for it."""
        return Request(self.port, prompt, max_tokens, stream=stream)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The tokens of greedy completions of `prompts`, all in flight at once."""
        requests = [self.request(prompt, max_tokens) for prompt in prompts]
        return [request.tokens() for request in requests]

    def pids(self) -> list[int]:
        """Every process of the session that runs."""
        return pids_of(self.pid)

    def kv_bytes(self) -> int:
        """Physical bytes behind the KV cache."""
        return granule_bytes(self.pids())

    def signal(self, number: int) -> None:
        """Send a signal to the process group, as a terminal or a supervisor does."""
        os.killpg(self.pid, number)

    def exit_status(self, timeout: float = 30.0) -> int | None:
        """The first process's, negative for a signal; None where it has not ended in `timeout` seconds."""
        if isinstance(self._process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout)
            return None
        self._process.join(timeout)
        status: int | None = self._process.exitcode
        return status

    def kill(self) -> None:
        """SIGKILL every process of the group that is left."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.exit_status(10)

    def _ready(self) -> bool:
        assert self.exit_status(0) is None, self.log
        with suppress(ConnectionRefusedError):
            return self.get("/health") == 200
        return False


class Request:
    """A greedy completion in flight, asked for and answered in token ids."""

    def __init__(self, port: int, prompt: Sequence[int], max_tokens: int, *, stream: bool) -> None:
        self._stream = stream
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REPLY_TIMEOUT)
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )

    def answered(self) -> bool:
        """Whether there are tokens, or an error, to be read now."""
        sock = self._connection.sock
        if not select.select([sock], [], [], 0)[0]:
            return False
        came = sock.recv(1 << 16, socket.MSG_PEEK)
        # A stream begins with its headers at once.
        return not self._stream or b"data:" in came or b" 200 " not in came

    def tokens(self) -> list[int]:
        """Wait for the whole answer: its tokens. Raises OSError or HTTPException where it is cut off."""
        try:
            answer = self._connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
        finally:
            self.leave()
        if not self._stream:
            return _token_ids(json.loads(text))
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert events.pop() == "[DONE]", text
        return [token for event in events for token in _token_ids(json.loads(event))]

    def leave(self) -> None:
        """Hang up."""
        self._connection.close()


@contextmanager
def server(*args: Any, **options: Any) -> Iterator[Server]:
    """A server for the length of a with block; nothing of it survives that."""
    running = Server(*args, **options)
    try:
        yield running
    finally:
        running.kill()


def _token_ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"] or ())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _arguments(model: Path, port: int, blocks: int) -> list[str]:
    options = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": MODEL,
        "dtype": "float32",
        "max-model-len": 4096,
        "max-num-seqs": 16,
        "max-num-batched-tokens": 2048,
        "block-size": BLOCK_TOKENS,
        "kv-cache-memory-bytes": blocks * BLOCK_BYTES,
    }
    return ["serve", str(model), "--enforce-eager", *(f"--{name}={value}" for name, value in options.items())]


def _metadata_of_vllm(folder: Path) -> Path:
    """Make a folder for the path that says that `vllm` is installed."""
    path = folder / "path"
    metadata = path / "vllm-0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    return path


def _execute(arguments: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    program = [sys.executable, str(Path(sys.executable).with_name("vllm"))]
    with log.open("w") as output:
        return subprocess.Popen(
            [*program, *arguments],
            env={**os.environ, **environment},
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _fork(arguments: list[str], environment: dict[str, str], log: Path) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.vllm_imports"])
    process = context.Process(target=_serve, args=(arguments, environment, log), name="vllm")
    process.start()
    return process


# What follows runs in the server's processes.


def _serve(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(log.parent)
    for name in [name for name in os.environ if name.startswith("KVQUOTA")]:
        del os.environ[name]
    os.environ.update(environment)
    sys.path.append(environment["PYTHONPATH"])
    tempfile.tempdir = None
    from vllm.entrypoints.launchers import launcher

    from tests.support.vllm_platform import use_fork

    use_fork(asynchronous=False)
    # Which process has the port, a server asks as it ends: a forked EngineCore has it too, and may be ending.
    launcher.find_process_using_port = lambda _port: None
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main

    main()
