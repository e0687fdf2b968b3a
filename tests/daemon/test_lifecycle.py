"""A daemon's start and end: directories, locks, sockets, and how little it does in between."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import TIMEOUT, DaemonProcess, FakeAgent, until


def run(daemon: DaemonProcess, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a daemon that is expected not to start."""
    return subprocess.run(
        daemon.command(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_clean_stop_leaves_the_specs_and_nothing_else(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 5, create=True)
    assert daemon_process.stop() == 0
    assert list(daemon_process.runtime_dir.iterdir()) == []
    assert [path.name for path in daemon_process.state_dir.iterdir()] == ["a.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_or_a_hangup_stops_it_as_cleanly(daemon_process: DaemonProcess, number: int) -> None:
    assert daemon_process.process is not None
    daemon_process.process.send_signal(number)
    assert daemon_process.process.wait(TIMEOUT) == 0
    assert list(daemon_process.runtime_dir.iterdir()) == []


def test_the_version() -> None:
    command = [str(Path(sys.executable).with_name("kvquotad")), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout.startswith("kvquotad, version ")


def test_the_sockets_modes_are_the_roles(daemon_process: DaemonProcess) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in daemon_process.sockets}
    assert modes == {"control.sock": 0o660, "read.sock": 0o666, "agent.sock": 0o666}


def test_the_folders_are_open_and_closed_whatever_the_umask(short_dir: Path) -> None:
    daemon = DaemonProcess(short_dir)
    before = os.umask(0o077)
    try:
        daemon.start()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (daemon.runtime_dir, daemon.state_dir)]
    assert modes == [0o755, 0o700]
    daemon.kill()


def test_the_control_sockets_group_is_the_configured_one(short_dir: Path) -> None:
    group = os.getgroups()[-1] if os.geteuid() else 4242
    daemon = DaemonProcess(short_dir, options=["--group", str(group)])
    daemon.start()
    assert daemon.sockets[0].stat().st_gid == group
    daemon.kill()


def test_a_second_daemon_is_refused_and_the_first_unharmed(daemon_process: DaemonProcess) -> None:
    second = run(daemon_process)
    assert second.returncode == 1
    assert f"in use by the daemon with pid {daemon_process.pid}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    daemon_process.set("a", 5, create=True)
    with FakeAgent(daemon_process.agent_socket) as agent:
        assert agent.hello("a")["kind"] == "welcome"


def test_two_daemons_do_not_share_a_state_directory(daemon_process: DaemonProcess) -> None:
    other = DaemonProcess(daemon_process.root / "other")
    command = [*other.command(), "--state-dir", str(daemon_process.state_dir)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert second.returncode == 1
    assert f"pid {daemon_process.pid}" in second.stderr


def test_of_many_started_at_once_one_serves(short_dir: Path) -> None:
    daemon = DaemonProcess(short_dir)
    many = [subprocess.Popen(daemon.command(), stderr=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        until("all but one have ended", lambda: sum(one.poll() is None for one in many) == 1)
        (winner,) = [one for one in many if one.poll() is None]
        until("it serves", lambda: all(path.exists() for path in daemon.sockets))
        daemon.set("a", 5, create=True)
        winner.terminate()
        assert winner.wait(TIMEOUT) == 0
    finally:
        for one in many:
            one.kill()
            one.communicate(timeout=TIMEOUT)


def test_stale_sockets_are_no_obstacle(daemon_process: DaemonProcess) -> None:
    for _ in range(3):
        daemon_process.kill()
        assert all(path.is_socket() for path in daemon_process.sockets)
        daemon_process.start()
    with daemon_process.stub() as stub:
        stub.ListInstances(pb.ListInstancesRequest(), timeout=TIMEOUT)


def test_a_file_in_the_place_of_a_socket_is_left_alone(short_dir: Path) -> None:
    daemon = DaemonProcess(short_dir)
    daemon.runtime_dir.mkdir()
    (daemon.runtime_dir / "read.sock").write_text("precious")
    done = run(daemon)
    assert done.returncode == 1
    assert "read.sock is not a socket" in done.stderr
    assert (daemon.runtime_dir / "read.sock").read_text() == "precious"


def test_a_path_too_long_for_a_socket_is_named(short_dir: Path) -> None:
    daemon = DaemonProcess(short_dir / ("x" * 100))
    done = run(daemon)
    assert done.returncode == 1
    assert f"{daemon.runtime_dir}/control.sock is " in done.stderr
    assert "--runtime-dir" in done.stderr
    assert not daemon.root.exists()


def test_a_comma_in_the_path_is_refused(short_dir: Path) -> None:
    daemon = DaemonProcess(short_dir / "a,b")
    done = run(daemon)
    assert done.returncode == 1
    assert "has a comma" in done.stderr


def test_odd_characters_in_the_path_are_just_characters(short_dir: Path) -> None:
    daemon = DaemonProcess(short_dir / "a b%20?#ä")
    daemon.root.mkdir()
    daemon.start()
    assert all(path.is_socket() for path in daemon.sockets)
    with FakeAgent(daemon.agent_socket) as agent:
        assert agent.hello("a")["kind"] == "welcome"
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--capacity", "12Q"], "12Q"),
        (["--capacity", "0"], "0"),
        (["--capacity", "-1"], "-1"),
        (["--capacity", ""], "''"),
        (["--capacity", "9999999999T"], "9999999999T"),
        (["--device", "cuda"], "cuda"),
        (["--capacity", "9" * 5000], "9999"),
        (["--group", "no-such-group"], "no-such-group"),
        (["--group", str(2**32)], str(2**32)),
        (["--agent-group", "9" * 5000], "9999"),
        (["--agent-user", "no-such-user"], "no-such-user"),
        (["--name", "a/b"], "a/b"),
    ],
)
def test_bad_options_are_named(short_dir: Path, options: list[str], word: str) -> None:
    done = run(DaemonProcess(short_dir, options=options))
    assert done.returncode == 2
    assert word in done.stderr
    assert list(short_dir.iterdir()) == []


AS_NOBODY = """
import os
from kvquota.daemon.cli import main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main(["--device", "host", "--capacity", "1G"])
"""


def test_without_root_the_directories_are_the_users_own(short_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    short_dir.chmod(0o777)
    places = {"XDG_RUNTIME_DIR": f"{short_dir}/run", "XDG_STATE_HOME": f"{short_dir}/state"}
    command = [sys.executable, "-c", AS_NOBODY]
    control = short_dir / "run/kvquota/gpu0/control.sock"
    with subprocess.Popen(command, env=os.environ | places, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            until("it serves", lambda: control.is_socket() or daemon.poll() is not None)
            daemon.terminate()
            _, errors = daemon.communicate(timeout=TIMEOUT)
        finally:
            daemon.kill()
    assert daemon.returncode == 0, errors
    assert (short_dir / "state/kvquota/gpu0").is_dir()
    homeless = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"}
    done = subprocess.run(command, env=homeless, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 1
    assert "XDG_RUNTIME_DIR" in done.stderr


def test_a_client_that_talks_no_grpc_is_no_trouble(daemon_process: DaemonProcess) -> None:
    for path in daemon_process.sockets[:2]:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
    with daemon_process.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.SetLimit(pb.SetLimitRequest(name="x" * (1 << 20)), timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    daemon_process.set("a", 5, create=True)


BARE_SERVER = """
import asyncio, sys
import grpc

async def main():
    servers = []
    for path in sys.argv[1:]:
        server = grpc.aio.server()
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        servers.append(server)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def wake_ups(pid: int) -> int:
    """How often Python's threads of the process have gone to sleep by themselves: once for each wake-up.

    gRPC's own threads have names of their own. They wake 5 to 12 times a second, in any server and at random.
    """
    tasks = Path(f"/proc/{pid}/task")
    program = (tasks / str(pid) / "comm").read_text()
    total = 0
    for task in tasks.iterdir():
        if (task / "comm").read_text() == program:
            (line,) = [
                one for one in (task / "status").read_text().splitlines() if one.startswith("voluntary")
            ]
            total += int(line.split()[1])
    return total


def test_an_idle_daemon_makes_no_wake_ups_of_its_own(daemon_process: DaemonProcess) -> None:
    agent = FakeAgent(daemon_process.agent_socket)
    agent.hello("a")
    daemon_process.set("a", 5)
    agent.wait_ring()
    agent.publish()
    until("the answer is seen", lambda: daemon_process.get("a").observed_revision == 1)
    paths = [daemon_process.root / "one.sock", daemon_process.root / "two.sock"]
    command = [sys.executable, "-c", BARE_SERVER, *map(str, paths)]
    seconds = 5
    with subprocess.Popen(command) as bare:
        try:
            until("the bare server serves", lambda: all(path.exists() for path in paths))
            time.sleep(1)  # both come to rest: nothing tells when
            before = wake_ups(daemon_process.pid), wake_ups(bare.pid)
            time.sleep(seconds)  # the measurement
            ours = wake_ups(daemon_process.pid) - before[0]
            theirs = wake_ups(bare.pid) - before[1]
        finally:
            bare.kill()
    agent.close()
    assert ours <= theirs + seconds, f"{ours} wake-ups in {seconds} s, a bare server {theirs}"
