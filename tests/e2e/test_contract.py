"""What outside checks rely on: kvquotad and kvctl as processes, from the first socket to the last."""

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvquota.native.status import Reason, Status

from tests.support.daemon import PAGE, DaemonProcess, FakeAgent

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SHARED_CHECK = ROOT.parent / "shared" / "contract-check"
KVCTL = str(BIN / "kvctl")
KEYS = {
    *("name", "engine", "pid", "connected", "status", "reason", "settled", "revision", "observed_revision"),
    *("limit_bytes", "effective_limit_bytes", "page_bytes", "capacity_bytes", "mapped_bytes", "pinned_bytes"),
    *("evictable_bytes", "warm_bytes", "retiring_bytes", "overage_bytes", "set_by", "set_at", "ranks"),
}


@dataclass(frozen=True)
class Operator:
    """Somebody with kvctl and a socket."""

    socket: Path

    def command(self, *arguments: str) -> list[str]:
        return [KVCTL, "--daemon", f"unix:{self.socket}", *arguments]

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = self.command(*arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def tell(self, *arguments: str) -> str:
        """Run kvctl, which must succeed; what it printed."""
        done = self.run(*arguments)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def fail(self, code: int, *arguments: str) -> str:
        """Run kvctl, which must fail with `code` and one line; that line."""
        done = self.run(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    def list(self) -> Any:
        return json.loads(self.tell("-o", "json", "list"))

    def status(self, name: str) -> Any:
        return json.loads(self.tell("-o", "json", "status", name))


@pytest.fixture
def operator(daemon_process: DaemonProcess) -> Operator:
    return Operator(daemon_process.runtime_dir / "control.sock")


@pytest.mark.skipif(not SHARED_CHECK.exists(), reason="no contract-check beside this checkout")
def test_the_shared_check_holds() -> None:
    command = [sys.executable, str(SHARED_CHECK), str(BIN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_three_sockets_and_who_may_use_them(daemon_process: DaemonProcess, operator: Operator) -> None:
    assert all(stat.S_ISSOCK(path.stat().st_mode) for path in daemon_process.sockets)
    assert stat.S_IMODE(operator.socket.stat().st_mode) == 0o660
    reader = Operator(operator.socket.with_name("read.sock"))
    assert reader.list() == []
    assert "control.sock" in reader.fail(1, "limit", "a", "1G", "--create")
    assert operator.list() == []


def test_a_limit_is_kept_for_an_engine_to_come(operator: Operator) -> None:
    assert "'llama'" in operator.fail(1, "limit", "llama", "512M")
    line = operator.tell("limit", "llama", "512M", "--create")
    assert line.startswith("llama: limit 512 MiB, revision 1: unavailable, not_connected")
    state = operator.status("llama")
    assert state.keys() >= KEYS
    assert (state["status"], state["reason"], state["connected"]) == ("unavailable", "not_connected", False)
    assert (state["limit_bytes"], state["pid"], state["set_by"]) == (512 << 20, None, "kvctl")
    assert state["mapped_bytes"] == 0
    assert state["set_at"].endswith("Z")
    assert "llama" in operator.fail(1, "status", "lama")


@pytest.mark.parametrize("size", ["12Q", "-1", "", "9" * 40])
def test_a_bad_size_stores_nothing(operator: Operator, size: str) -> None:
    assert (size or "''") in operator.fail(2, "limit", "a", size, "--create")
    assert operator.list() == []


def test_revisions_are_one_order(operator: Operator) -> None:
    operator.tell("limit", "a", "512M", "--create")
    first = operator.status("a")["revision"]
    operator.tell("limit", "a", "512M", "--revision", str(first))
    assert "limit 512 MiB" in operator.fail(4, "limit", "a", "1G", "--revision", str(first))
    assert f"revision {first}" in operator.fail(4, "limit", "a", "1G", "--expect", str(first + 7))
    operator.tell("limit", "a", "0", "--revision", str(first + 10))
    assert f"revision {first + 10}" in operator.fail(4, "limit", "a", "1G", "--revision", str(first + 9))
    assert f"revision {first + 10}" in operator.fail(4, "limit", "a", "1G", "--revision", "0")
    assert operator.status("a")["limit_bytes"] == 0
    operator.tell("limit", "a", "none")
    last = operator.status("a")
    assert (last["limit_bytes"], last["revision"]) == (None, first + 11)
    assert str(2**40) in operator.fail(1, "limit", "a", "1G", "--revision", str(2**40))
    assert operator.status("a") == last


def test_of_two_that_expect_the_same_revision_one_wins(operator: Operator) -> None:
    operator.tell("limit", "a", "1M", "--create")
    both = [
        subprocess.Popen(
            operator.command("-o", "json", "limit", "a", size, "--expect", "1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for size in ("2M", "3M")
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert sorted(process.returncode for process in both) == [0, 4]
    # The loser is told what the winner has set.
    assert answers[0]["limit_bytes"] == answers[1]["limit_bytes"] == operator.status("a")["limit_bytes"]


def test_a_wait_for_an_absent_engine_ends_at_once(operator: Operator) -> None:
    line = operator.tell("limit", "a", "0", "--create", "--wait", "--timeout", "3600")
    assert line.startswith("a: limit 0, revision 1: unavailable, not_connected")


def test_a_wait_ends_when_the_engine_has_settled(daemon_process: DaemonProcess, operator: Operator) -> None:
    agent = FakeAgent(daemon_process.agent_socket)
    try:
        agent.hello("a")
        agent.publish(pinned_pages=10, evictable_pages=0, warm_pages=0)
        assert operator.status("a")["pid"] == os.getpid()
        wait = operator.command("limit", "a", str(PAGE), "--wait")
        with subprocess.Popen(wait, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            agent.wait_ring()
            agent.publish(
                revision_applied=0,
                pinned_pages=10,
                evictable_pages=0,
                warm_pages=0,
                status=Status.DEFERRED,
                reason=Reason.PINNED_BY_RUNNING_REQUESTS,
            )
            late = operator.fail(5, "limit", "a", str(PAGE), "--revision", "1", "--wait", "--timeout", "0.1")
            assert "deferred, pinned_by_running_requests" in late
            agent.publish(mapped_pages=1, pinned_pages=1, evictable_pages=0, warm_pages=0)
            assert process.communicate(timeout=60) == (
                "a: limit 2 MiB, mapped 2 MiB, revision 1: applied\n",
                "",
            )
            assert process.returncode == 0
    finally:
        agent.close()


def test_a_second_daemon_leaves_the_first_alone(daemon_process: DaemonProcess, operator: Operator) -> None:
    second = subprocess.run(daemon_process.command(), capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert str(daemon_process.pid) in second.stderr
    assert operator.list() == []


def test_what_was_set_survives_sigkill(daemon_process: DaemonProcess, operator: Operator) -> None:
    operator.tell("limit", "a", "3M", "--create", "--revision", "41")
    before = operator.status("a")
    daemon_process.kill()
    assert str(operator.socket) in operator.fail(3, "list")
    daemon_process.start()
    assert operator.status("a") == before


def test_a_watch_sees_each_change_and_ends_with_the_daemon(
    daemon_process: DaemonProcess, operator: Operator
) -> None:
    operator.tell("limit", "a", "1M", "--create")
    command = operator.command("-o", "json", "watch", "a")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["limit_bytes"] == 1 << 20
        operator.tell("limit", "b", "1M", "--create")
        operator.tell("limit", "a", "none")
        assert json.loads(watch.stdout.readline())["limit_bytes"] is None
        assert daemon_process.stop() == 0
        out, err = watch.communicate(timeout=60)
    assert (watch.returncode, out) == (3, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_daemon_leaves_no_socket(daemon_process: DaemonProcess, number: signal.Signals) -> None:
    assert daemon_process.process is not None
    daemon_process.process.send_signal(number)
    assert daemon_process.process.wait(60) == 0
    assert os.listdir(daemon_process.runtime_dir) == []


def test_the_users_own_daemon_is_found_without_being_named(short_dir: Path) -> None:
    if os.path.exists("/run/kvquota/gpu0/control.sock"):
        pytest.skip("a daemon of the system is here")
    folder = short_dir / "kvquota" / "gpu0"
    daemon = DaemonProcess(short_dir, options=["--runtime-dir", str(folder)])
    environment = {key: value for key, value in os.environ.items() if key != "KVQUOTA_DAEMON"}
    environment["XDG_RUNTIME_DIR"] = str(short_dir)
    daemon.start()
    try:
        subprocess.run([KVCTL, "list"], env=environment, capture_output=True, timeout=60, check=True)
    finally:
        daemon.kill()
