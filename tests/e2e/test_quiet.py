"""Nobody polls: an idle daemon with an agent attached wakes up no more than a bare gRPC server does."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess, FakeAgent

WINDOW = 5.0
BARE = """
import asyncio, sys, grpc
from kvquota.v1.quota_pb2_grpc import QuotaServicer, add_QuotaServicer_to_server

async def serve() -> None:
    servers = [grpc.aio.server() for _ in range(2)]
    for number, server in enumerate(servers):
        add_QuotaServicer_to_server(QuotaServicer(), server)
        server.add_insecure_port(f"unix:{sys.argv[1]}/{number}.sock")
        await server.start()
    print("ready", flush=True)
    await servers[0].wait_for_termination()

asyncio.run(serve())
"""


def wake_ups(pid: int) -> int:
    """Times that a process's threads went to sleep of their own accord: each ended in a wake-up."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        total += int(fields["voluntary_ctxt_switches"])
    return total


@pytest.fixture
def bare(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", BARE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_an_idle_daemon_with_an_agent_is_as_quiet_as_a_bare_server(
    daemon_process: DaemonProcess, bare: "subprocess.Popen[str]"
) -> None:
    agent = FakeAgent(daemon_process.agent_socket)
    assert agent.hello("chat")["kind"] == "welcome"
    agent.publish()
    assert daemon_process.get("chat").connected
    before = wake_ups(daemon_process.pid), wake_ups(bare.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        bare.wait(WINDOW)
    after = wake_ups(daemon_process.pid), wake_ups(bare.pid)
    ours, theirs = (later - earlier for earlier, later in zip(before, after, strict=True))
    assert ours <= theirs + WINDOW
    agent.close()
