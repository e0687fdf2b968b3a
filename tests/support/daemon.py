"""A real kvquotad in its own short directory, its gRPC stubs, and a leader in plain Python."""

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from kvquota.native import Desired, DesiredReader, Observed, ObservedWriter
from kvquota.native.status import Reason, Status
from kvquota.v1 import quota_pb2 as pb
from kvquota.v1.quota_pb2_grpc import QuotaStub

PAGE = 2 << 20
TIMEOUT = 20.0


def until(what: str, test: Callable[[], object], timeout: float = TIMEOUT) -> None:
    """Wait until `test` holds. For states that tell nobody when they change."""
    end = time.monotonic() + timeout
    while not test():
        assert time.monotonic() < end, f"waited {timeout} s for: {what}"
        time.sleep(0.01)


@dataclass
class DaemonProcess:
    """A daemon that a test starts, kills and starts again on the same directories."""

    root: Path
    capacity: str = "1G"
    options: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

    @property
    def runtime_dir(self) -> Path:
        return self.root / "run"

    @property
    def state_dir(self) -> Path:
        return self.root / "state"

    @property
    def agent_socket(self) -> Path:
        return self.runtime_dir / "agent.sock"

    def environment(self, instance: str) -> dict[str, str]:
        """What makes an engine join this daemon under that name."""
        return {
            "KVQUOTA": "1",
            "KVQUOTA_AGENT_SOCKET": str(self.agent_socket),
            "KVQUOTA_INSTANCE": instance,
        }

    @property
    def sockets(self) -> list[Path]:
        return [self.runtime_dir / f"{name}.sock" for name in ("control", "read", "agent")]

    @property
    def log(self) -> str:
        """All that the daemons of this directory have logged."""
        return (self.root / "log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def command(self) -> list[str]:
        where = ["--runtime-dir", str(self.runtime_dir), "--state-dir", str(self.state_dir)]
        program = [str(Path(sys.executable).with_name("kvquotad"))]
        return [
            *program,
            "--name",
            "gpu0",
            "--device",
            "host",
            "--capacity",
            self.capacity,
            *where,
            *self.options,
        ]

    def start(self) -> None:
        """Start it, and return once it serves."""
        seen = self.log.count(" ready ") if (self.root / "log").exists() else 0
        with (self.root / "log").open("a") as log:
            self.process = subprocess.Popen(self.command(), stderr=log, text=True)
        until("the daemon is ready", lambda: self.log.count(" ready ") > seen or self.process_ended())
        assert not self.process_ended(), self.log

    def process_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(TIMEOUT)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT)

    @contextmanager
    def stub(self, name: str = "control") -> Iterator[Any]:
        with grpc.insecure_channel(f"unix:{self.runtime_dir}/{name}.sock") as channel:
            yield QuotaStub(channel)  # type: ignore[no-untyped-call]  # generated

    def get(self, name: str) -> pb.Instance:
        with self.stub("read") as stub:
            instance: pb.Instance = stub.GetInstance(pb.GetInstanceRequest(name=name), timeout=TIMEOUT)
            return instance

    def set(self, name: str, limit: int | None, **fields: Any) -> pb.SetLimitResponse:
        with self.stub() as stub:
            request = pb.SetLimitRequest(name=name, limit_bytes=limit, **fields)
            response: pb.SetLimitResponse = stub.SetLimit(request, timeout=TIMEOUT)
            return response


class FakeAgent:
    """A leader that does what a test says. It talks to the daemon over the socket, as any program could."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(path))
        self.sock.settimeout(TIMEOUT)
        self.fds: list[int] = []
        self.reader: DesiredReader | None = None
        self.writer: ObservedWriter | None = None

    def __enter__(self) -> "FakeAgent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, message: dict[str, object] | bytes) -> None:
        self.sock.send(message if isinstance(message, bytes) else json.dumps(message).encode())

    def hear(self) -> dict[str, Any] | None:
        """The daemon's next JSON packet; None when it hung up."""
        payload, ancillary, _, _ = self.sock.recvmsg(4096, socket.CMSG_SPACE(64))
        for _, _, data in ancillary:
            fds = array.array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            self.fds.extend(fds)
        return json.loads(payload) if payload else None

    def hello(self, instance: str, **fields: object) -> dict[str, Any]:
        """Say hello; the answer. A welcome comes with the segments open."""
        message: dict[str, object] = {
            "kind": "hello", "min_version": 1, "max_version": 1, "instance": instance, "engine": "fake 1.0",
            "pid_reported": os.getpid(), "base": None, "revision": 0, "limit_bytes": None,
        }  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # refused already; the answer says why
            self.say(message | fields)
        answer = self.hear()
        assert answer is not None
        if answer["kind"] == "welcome":
            self.reader = DesiredReader(self.fds[0])
            self.writer = ObservedWriter(self.fds[1])
        return answer

    def desired(self) -> Desired:
        assert self.reader is not None
        desired, fresh = self.reader.read()
        assert fresh
        return desired

    def wait_ring(self) -> None:
        """Wait for the daemon's doorbell and take it."""
        assert self.sock.recv(4096) == b"!"

    def publish(self, ring: bool = True, **fields: object) -> None:
        """Write `observed`: in order with the desired revision, but for `fields`."""
        assert self.writer is not None
        self.writer.write(report(self.desired().revision, **fields))
        if ring:
            self.sock.send(b"!")

    def hung_up(self) -> bool:
        """Whether the daemon has closed the connection by now."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(TIMEOUT * 1000))

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        if self.writer is not None:
            self.writer.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.sock.close()


def report(revision: int, **fields: object) -> Observed:
    """An `observed` of ten mapped pages out of a hundred, applied at `revision`, but for `fields`."""
    observed = Observed()
    values: dict[str, object] = {
        "revision_decided": revision, "revision_applied": revision, "status": int(Status.APPLIED),
        "reason": int(Reason.NONE), "page_bytes": PAGE, "capacity_pages": 100, "target_pages": 100,
        "mapped_pages": 10, "pinned_pages": 4, "evictable_pages": 5, "warm_pages": 1, "ranks": 1,
    }  # fmt: skip
    for name, value in (values | fields).items():
        setattr(observed, name, value)
    return observed
