"""kvquota.v1.Quota over the registry."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from kvquota.daemon import errors
from kvquota.daemon.registry import LimitChange, Registry
from kvquota.daemon.spec import MAX_SET_BY, name_problem
from kvquota.v1 import quota_pb2 as pb
from kvquota.v1.quota_pb2_grpc import QuotaServicer

STATE_METADATA = "kvquota-instance-bin"
DEFAULT_WAIT_MS = 30_000

_CODES: dict[type[errors.QuotaError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownInstanceError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.ABORTED,
    errors.SupersededError: grpc.StatusCode.ABORTED,
    errors.StaleError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StorageError: grpc.StatusCode.INTERNAL,
    errors.StoppingError: grpc.StatusCode.UNAVAILABLE,
}

Context = grpc.aio.ServicerContext[Any, Any]


class QuotaService(QuotaServicer):
    """The calls of one socket: the reading ones, and the others where `may_write`."""

    def __init__(self, registry: Registry, may_write: bool) -> None:
        self._registry = registry
        self._may_write = may_write

    async def ListInstances(
        self, _request: pb.ListInstancesRequest, _context: Context
    ) -> pb.ListInstancesResponse:
        """Every instance, by name."""
        return pb.ListInstancesResponse(instances=map(self._registry.view, self._registry.names()))

    async def GetInstance(self, request: pb.GetInstanceRequest, context: Context) -> pb.Instance:
        """One instance, read at this moment."""
        try:
            return self._registry.view(request.name)
        except errors.QuotaError as problem:
            await self._abort(context, problem, request.name)

    async def SetLimit(self, request: pb.SetLimitRequest, context: Context) -> pb.SetLimitResponse:
        """Set a limit, and wait for it if asked to."""
        if not self._may_write:
            denied = "this socket serves the reading calls only: use control.sock"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, denied)
        try:
            revision = await self._registry.set_limit(_change(request))
            if not request.wait:
                return pb.SetLimitResponse(instance=self._registry.view(request.name))
            return await self._wait(request, revision)
        except errors.QuotaError as problem:
            await self._abort(context, problem, request.name)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        """A snapshot, then changes. A slow reader gets fewer of them, each as it is when it is sent."""
        with self._registry.subscribe(frozenset(request.names) or None) as subscription:
            names = filter(subscription.covers, self._registry.names())
            yield pb.WatchResponse(snapshot=True, instances=map(self._registry.view, names))
            while True:
                try:
                    changed = await subscription.changes()
                except errors.StoppingError as problem:
                    await self._abort(context, problem, "")
                known = filter(self._registry.knows, changed)
                removed = [name for name in changed if not self._registry.knows(name)]
                yield pb.WatchResponse(instances=map(self._registry.view, known), removed=removed)

    async def _wait(self, request: pb.SetLimitRequest, revision: int) -> pb.SetLimitResponse:
        timeout = (request.wait_timeout_ms if request.HasField("wait_timeout_ms") else DEFAULT_WAIT_MS) / 1000
        try:
            instance = await asyncio.wait_for(self._registry.settled(request.name, revision), timeout)
        except asyncio.TimeoutError:
            now = self._registry.view(request.name)
            return pb.SetLimitResponse(instance=now, timed_out=now.connected and not now.settled)
        return pb.SetLimitResponse(instance=instance)

    async def _abort(self, context: Context, problem: errors.QuotaError, name: str) -> NoReturn:
        state = self._registry.view(name).SerializeToString() if self._registry.knows(name) else None
        metadata = () if state is None else ((STATE_METADATA, state),)
        await context.abort(_CODES[type(problem)], str(problem), metadata)


def _change(request: pb.SetLimitRequest) -> LimitChange:
    if problem := name_problem(request.name):
        raise errors.InvalidRequestError(problem)
    if request.limit_bytes < 0:
        raise errors.InvalidRequestError(
            f"limit_bytes is {request.limit_bytes}: expected 0 or more, or unset"
        )
    if request.wait_timeout_ms < 0:
        raise errors.InvalidRequestError(f"wait_timeout_ms is {request.wait_timeout_ms}: expected 0 or more")
    if len(request.set_by) > MAX_SET_BY or not request.set_by.isprintable():
        raise errors.InvalidRequestError(
            f"set_by is {request.set_by[:MAX_SET_BY]!r}: expected at most {MAX_SET_BY} printable characters"
        )
    return LimitChange(
        name=request.name,
        limit_bytes=request.limit_bytes if request.HasField("limit_bytes") else None,
        revision=request.revision if request.HasField("revision") else None,
        expected_revision=request.expected_revision if request.HasField("expected_revision") else None,
        create=request.create,
        set_by=request.set_by or "grpc",
    )
