"""A gRPC server on a Unix socket. Roles are the socket's file mode: grpcio can't tell a peer's uid."""

import os
from pathlib import Path
from urllib.parse import quote

import grpc
from kvquota.daemon.errors import StartError
from kvquota.daemon.service import QuotaService
from kvquota.v1.quota_pb2_grpc import add_QuotaServicer_to_server

MAX_CALLS = 256
"""Calls at a time on one socket, open watches included; more are told RESOURCE_EXHAUSTED."""
_MAX_REQUEST = 64 << 10


def bind(service: QuotaService, path: Path, mode: int, gid: int | None) -> grpc.aio.Server:
    """A server for `service` on `path`, to be started, with `mode` and group `gid`. Raises StartError."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", _MAX_REQUEST)], maximum_concurrent_rpcs=MAX_CALLS
    )
    add_QuotaServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
    mask = os.umask(0o777)  # nobody connects before mode and group are right
    try:
        server.add_insecure_port(f"unix:{quote(str(path))}")
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(mode)
    except (RuntimeError, OSError) as problem:
        raise StartError(f"{path}: {problem}") from problem
    finally:
        os.umask(mask)
    return server
