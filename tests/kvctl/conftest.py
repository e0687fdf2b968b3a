"""A daemon that answers what a test tells it to, over a real socket."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvquota.v1 import quota_pb2_grpc
from kvquota.v1.quota_pb2 import Instance

Handler = Callable[[Any, grpc.ServicerContext], Any]


class ScriptedQuota(quota_pb2_grpc.QuotaServicer):
    """kvquota.v1.Quota with the answers `on[CALL]`; keeps what it was asked in `requests`."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "control.sock"
        self.on: dict[str, Handler] = {}
        self.requests: list[Any] = []
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool)
        quota_pb2_grpc.add_QuotaServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def refuse(self, call: str, code: grpc.StatusCode, details: str, state: Instance | None = None) -> None:
        """Answer `call` with an error, and with the instance's current state where there is one."""

        def handler(_: Any, context: grpc.ServicerContext) -> Any:
            if state is not None:
                context.set_trailing_metadata((("kvquota-instance-bin", state.SerializeToString()),))
            context.abort(code, details)

        self.on[call] = handler

    def stop(self) -> None:
        """Go away at once, with every call that is under way."""
        self._server.stop(None).wait(10)
        self._pool.shutdown()

    def ListInstances(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer("ListInstances", request, context)

    def GetInstance(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer("GetInstance", request, context)

    def SetLimit(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer("SetLimit", request, context)

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer("Watch", request, context)

    def _answer(self, call: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return self.on[call](request, context)


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedQuota]:
    """The scripted daemon; kvctl finds it by KVQUOTA_DAEMON."""
    scripted = ScriptedQuota(tmp_path)
    monkeypatch.setenv("KVQUOTA_DAEMON", f"unix:{scripted.socket}")
    yield scripted
    scripted.stop()
