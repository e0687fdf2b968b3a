"""The daemon from its first lock to its last socket."""

import asyncio
import resource
import signal
import uuid
from contextlib import AsyncExitStack

from kvquota.daemon import log
from kvquota.daemon.agent_socket import AgentSocket
from kvquota.daemon.directory import LockedFolder, RuntimeDirectory
from kvquota.daemon.errors import StartError
from kvquota.daemon.registry import Device, Registry
from kvquota.daemon.server import bind
from kvquota.daemon.service import QuotaService
from kvquota.daemon.settings import Settings
from kvquota.daemon.spec_store import SpecStore
from kvquota.native import DeviceRecord

_STOP_GRACE = 2.0
"""Seconds that calls have to end once the daemon stops."""


async def run(settings: Settings) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Raises StartError."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _raise_descriptor_limit()
    async with AsyncExitStack() as stack:
        runtime = RuntimeDirectory(settings.runtime_dir)
        stack.callback(runtime.close)
        state = LockedFolder(settings.state_dir, 0o700)
        stack.callback(state.close)
        runtime.remove_sockets()
        stack.callback(runtime.remove_sockets)

        record = DeviceRecord.create(settings.capacity_bytes)
        stack.callback(record.close)
        device = Device(settings.device, uuid.uuid4().hex, [record.fileno()])
        try:
            registry = Registry(SpecStore(state.path), device)
        except OSError as problem:
            raise StartError(f"{problem.filename or state.path}: {problem.strerror}") from problem
        stack.push_async_callback(registry.close)

        for path, mode, gid in ((runtime.control, 0o660, settings.control_gid), (runtime.read, 0o666, None)):
            server = bind(QuotaService(registry, may_write=path == runtime.control), path, mode, gid)
            await server.start()
            stack.push_async_callback(server.stop, _STOP_GRACE)
        stack.callback(registry.stop_waiting)
        agent_socket = AgentSocket(runtime.agent, settings.admission, registry)
        stack.push_async_callback(agent_socket.close)
        log.info("ready", name=settings.name, directory=runtime.path, boot_id=device.boot_id)
        await stop.wait()
        log.info("stopping", name=settings.name)


def _raise_descriptor_limit() -> None:
    # A leader takes four descriptors; the soft limit is often 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
