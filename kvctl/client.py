"""The daemon as kvctl sees it: calls with a deadline, and every failure as one line with an exit code."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from urllib.parse import quote

# The library's own log lines would stand beside the one line that says what went wrong.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
from kvquota.kvctl.errors import CallError, ConflictError, KvctlError, UnreachableError
from kvquota.v1.quota_pb2 import (
    GetInstanceRequest,
    Instance,
    ListInstancesRequest,
    SetLimitRequest,
    SetLimitResponse,
    WatchRequest,
    WatchResponse,
)
from kvquota.v1.quota_pb2_grpc import QuotaStub

DEADLINE_S = 10.0
"""Of every call, beyond the time that it was asked to wait."""

_STATE_KEY = "kvquota-instance-bin"


class Client:
    """A connection to the daemon at `path`, a Unix socket. Every call may raise a KvctlError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._channel = grpc.insecure_channel(f"unix:{quote(path)}")
        self._stub: Any = QuotaStub(self._channel)  # type: ignore[no-untyped-call]  # generated code has no types

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def instances(self) -> list[Instance]:
        """Every instance, in the daemon's order."""
        with self._errors():
            return list(self._stub.ListInstances(ListInstancesRequest(), timeout=DEADLINE_S).instances)

    def instance(self, name: str) -> Instance:
        """The instance `name`."""
        with self._errors():
            found: Instance = self._stub.GetInstance(GetInstanceRequest(name=name), timeout=DEADLINE_S)
            return found

    def set_limit(self, request: SetLimitRequest) -> SetLimitResponse:
        """Set a limit; with `request.wait`, `wait_timeout_ms` must say for how long."""
        wait_s = request.wait_timeout_ms / 1000 if request.wait else 0.0
        with self._errors(unknown="--create keeps a limit for an engine to come"):
            answer: SetLimitResponse = self._stub.SetLimit(request, timeout=DEADLINE_S + wait_s)
            return answer

    def watch(self, names: list[str]) -> Iterator[WatchResponse]:
        """A snapshot of `names` (empty: all), then their changes; UnreachableError when the daemon goes."""
        with self._errors():
            yield from self._stub.Watch(WatchRequest(names=names))
        raise UnreachableError(f"the daemon at {self._path} has stopped: start it and repeat the command")

    @contextmanager
    def _errors(self, unknown: str = "kvctl list shows all") -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._explain(error, unknown) from error

    def _explain(self, error: Any, unknown: str) -> KvctlError:
        code, details = error.code(), error.details() or "no reason given"
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
            return UnreachableError(self._why_unreachable(details))
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"the daemon at {self._path} does not answer; look at its log")
        if code in {grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION}:
            return ConflictError(details, _state(error))
        if code is grpc.StatusCode.NOT_FOUND:
            details = f"{details} ({unknown})"
        return CallError(details)

    def _why_unreachable(self, details: str) -> str:
        """What a plain connection says: gRPC's own words name neither the cause nor what to do."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(DEADLINE_S)
            try:
                probe.connect(self._path)
            except PermissionError:
                return f"no permission to use {self._path}: join its group"
            except OSError as error:
                return (
                    f"no daemon at {self._path} ({error.strerror}): "
                    "start kvquotad, or name its control.sock with --daemon unix:PATH"
                )
        return f"the daemon at {self._path} ended the call ({details}): repeat the command"


def _state(error: Any) -> Instance | None:
    for key, value in error.trailing_metadata() or ():
        if key == _STATE_KEY:
            return Instance.FromString(value)
    return None
