"""agent.sock: who is let in, what nonsense does, and that an engine's end is seen at once."""

import fcntl
import mmap
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvquota.daemon.registry import MAX_FORGETTABLE
from kvquota.native.status import Reason, Status
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import PAGE, TIMEOUT, DaemonProcess, FakeAgent, until


def connected(daemon: DaemonProcess) -> FakeAgent:
    return FakeAgent(daemon.agent_socket)


def serves_others(daemon: DaemonProcess) -> None:
    """The daemon lets a well-behaved engine in, and answers."""
    with connected(daemon) as agent:
        assert agent.hello("well-behaved")["kind"] == "welcome"
        agent.publish()
        assert daemon.get("well-behaved").connected
    wait_gone(daemon, "well-behaved")


def wait_gone(daemon: DaemonProcess, name: str) -> None:
    with daemon.stub("read") as stub:
        for response in stub.Watch(pb.WatchRequest(names=[name]), timeout=TIMEOUT):
            if all(not instance.connected for instance in response.instances):
                return


def test_an_engine_joins_and_is_shown_as_it_is(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        answer = agent.hello("team/a", engine="vllm 0.32.0", pid_reported=1)
        assert (answer["kind"], answer["version"], answer["device"]) == ("welcome", 1, "host")
        assert len(agent.fds) == 3
        shown = daemon_process.get("team/a")
        assert (shown.connected, shown.pid, shown.engine) == (True, os.getpid(), "vllm 0.32.0")
        assert "pid_reported=1 " in daemon_process.log
        assert (shown.status, shown.revision) == (pb.STATUS_APPLIED, 0)
        # Counters move without a ring: what is shown is read when it is asked for.
        agent.publish(ring=False, mapped_pages=12, pinned_pages=6)
        assert daemon_process.get("team/a").mapped_bytes == 12 * PAGE
    wait_gone(daemon_process, "team/a")
    shown = daemon_process.get("team/a")
    assert (shown.status, shown.engine, shown.mapped_bytes) == (pb.STATUS_UNAVAILABLE, "vllm 0.32.0", 0)


def test_a_limit_set_before_the_engine_started_is_in_force_with_the_welcome(
    daemon_process: DaemonProcess,
) -> None:
    daemon_process.set("a", 0, create=True)
    with connected(daemon_process) as agent:
        agent.hello("a")
        assert (agent.desired().revision, agent.desired().limit_bytes) == (1, 0)


def test_an_engine_limited_without_a_daemon_brings_its_limit(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a", revision=4, limit_bytes=5)
        assert (agent.desired().revision, agent.desired().limit_bytes) == (4, 5)
        shown = daemon_process.get("a")
        assert (shown.revision, shown.limit_bytes, shown.set_by) == (4, 5, "agent")
    daemon_process.kill()
    daemon_process.start()
    assert daemon_process.get("a").limit_bytes == 5


def test_after_a_restart_engines_join_at_the_same_revisions(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 5, create=True)
    with connected(daemon_process) as agent:
        first = agent.hello("a")
        daemon_process.kill()
        assert agent.hung_up()
    daemon_process.start()
    with connected(daemon_process) as agent:
        second = agent.hello("a", base=1, revision=1, limit_bytes=5)
        assert second["boot_id"] != first["boot_id"]
        assert (agent.desired().revision, agent.desired().limit_bytes) == (1, 5)
    daemon_process.set("a", 7)
    with connected(daemon_process) as agent:
        agent.hello("a", base=1, revision=3, limit_bytes=6)
        assert (agent.desired().revision, agent.desired().limit_bytes) == (4, 7)
    assert "superseded_local" in daemon_process.log


HELLO = (
    b'{"kind":"hello","min_version":1,"max_version":1,"instance":"a","engine":"e",'
    b'"pid_reported":1,"base":null,"revision":0,"limit_bytes":null}'
)


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (b"garbage", "bad_hello"),
        (b"!", "bad_hello"),
        (HELLO[:40], "bad_hello"),
        (b"\x00\xff" * 100, "bad_hello"),
        (b"[" * 4000, "bad_hello"),
        (b"x" * 5000, "bad_hello"),
        (b"{}", "bad_hello"),
        (HELLO.replace(b'"hello"', b'"welcome"'), "bad_hello"),
        (HELLO.replace(b'"a"', b'"../a"'), "bad_hello"),
        (HELLO.replace(b'"a"', b'""'), "bad_hello"),
        (HELLO.replace(b"{", b'{"wakes": 1, ', 1), "bad_hello"),
        (HELLO.replace(b'"a"', b"7"), "bad_hello"),
        (HELLO.replace(b'"e"', b'"e\\n"'), "bad_hello"),
        (HELLO.replace(b'"revision":0', b'"revision":-1'), "bad_hello"),
        (HELLO.replace(b'"revision":0', b'"revision":9223372036854775807'), "bad_hello"),
        (HELLO.replace(b'"base":null', b'"base":5'), "bad_hello"),
        (HELLO.replace(b'"pid_reported":1', b'"pid_reported":-1'), "bad_hello"),
        (HELLO.replace(b'"limit_bytes":null', b'"limit_bytes":-1'), "bad_hello"),
        (HELLO.replace(b'"limit_bytes":null', b'"limit_bytes":1e3'), "bad_hello"),
        (HELLO.replace(b'"min_version":1,"max_version":1', b'"min_version":2,"max_version":3'), "version"),
        (HELLO.replace(b'"min_version":1', b'"min_version":"1"'), "bad_hello"),
    ],
)
def test_what_is_no_hello_is_refused_with_a_reason(
    shared_daemon: DaemonProcess, packet: bytes, code: str
) -> None:
    with connected(shared_daemon) as agent:
        agent.say(packet)
        answer = agent.hear()
        assert answer is not None
        assert (answer["kind"], answer["code"]) == ("refused", code)
        assert answer["message"]
        assert agent.hear() is None
    assert re.search(rf"refused pid={os.getpid()} .*code={code} ", shared_daemon.log)
    serves_others(shared_daemon)


def test_a_descriptor_with_the_hello_is_refused(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        socket.send_fds(agent.sock, [HELLO], [0])
        answer = agent.hear()
        assert answer is not None
        assert answer["code"] == "bad_hello"
    serves_others(daemon_process)


def test_who_connects_and_says_nothing_is_dropped(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        answer = agent.hear()
        assert answer is not None
        assert (answer["code"], "no hello" in answer["message"]) == ("bad_hello", True)


def test_who_hangs_up_without_a_hello_is_noted(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process):
        pass
    until("the log says so", lambda: "hung up without a hello" in daemon_process.log)


def test_a_thousand_silent_connections_keep_nobody_out(daemon_process: DaemonProcess) -> None:
    silent = []
    try:
        for _ in range(1000):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            silent.append(connection)
            connection.connect(str(daemon_process.agent_socket))
            connection.settimeout(TIMEOUT)
        serves_others(daemon_process)
        assert b"too_many" in silent[0].recv(4096)
    finally:
        for connection in silent:
            connection.close()
    assert len(os.listdir(f"/proc/{daemon_process.pid}/fd")) < 300


def test_garbage_after_the_hello_ends_the_link(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        agent.say(b"garbage")
        assert agent.hung_up()
    assert "bad packet" in daemon_process.log
    serves_others(daemon_process)


def test_the_log_tells_an_engine_that_left_from_one_that_was_lost(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        assert agent.hello("leaves")["bye"] is True
        agent.say({"kind": "bye"})
    wait_gone(daemon_process, "leaves")
    with connected(daemon_process) as agent:
        agent.hello("ends")
    wait_gone(daemon_process, "ends")
    assert " left instance=leaves pid=" in daemon_process.log
    assert " lost instance=ends pid=" in daemon_process.log
    assert daemon_process.log.count("leaves") == 2


def test_an_unknown_kind_is_noted_once_and_ignored(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        for _ in range(10):
            agent.say({"kind": "dance"})
        until("the log says so", lambda: "dance" in daemon_process.log)
        assert daemon_process.get("a").connected
    assert daemon_process.log.count("dance") == 1


def test_nonsense_in_the_segment_is_clamped_and_flagged(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        agent.publish(mapped_pages=-(2**63), pinned_pages=2**63 - 1, page_bytes=-5)
        shown = daemon_process.get("a")
        assert (shown.status, shown.reason) == (pb.STATUS_DEGRADED, pb.REASON_SEGMENT_UNREADABLE)
        assert "page_bytes is -5" in shown.detail
        assert (shown.mapped_bytes, shown.pinned_bytes) == (0, 0)
        agent.publish()
        assert daemon_process.get("a").status == pb.STATUS_APPLIED


def test_a_torn_segment_keeps_the_last_report_and_is_flagged(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        agent.publish()
        assert daemon_process.get("a").mapped_bytes == 10 * PAGE
        with mmap.mmap(agent.fds[1], 4096) as segment:
            segment[16:4096] = b"\xff" * 4080
            shown = daemon_process.get("a")
            assert shown.status == pb.STATUS_DEGRADED
            segment[:] = os.urandom(4096)
            daemon_process.get("a")
    serves_others(daemon_process)


def test_an_agent_can_not_write_its_own_limit(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        desired = agent.fds[0]
        with pytest.raises(PermissionError):
            mmap.mmap(desired, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(desired, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(desired, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(desired, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        writable = os.open(f"/proc/self/fd/{desired}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(writable, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(writable)


def test_an_agent_that_never_drains_its_doorbell_holds_nobody_up(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        agent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with daemon_process.stub() as stub:
            for limit in range(400):
                stub.SetLimit(pb.SetLimitRequest(name="a", limit_bytes=limit), timeout=TIMEOUT)
        assert agent.desired().limit_bytes == 399
        serves_others(daemon_process)


def test_a_ring_without_an_answer_shows_and_an_answer_clears_it(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent, daemon_process.stub("read") as stub:
        agent.hello("a")
        agent.publish()
        watch = stub.Watch(pb.WatchRequest(names=["a"]), timeout=TIMEOUT)
        daemon_process.set("a", 5)
        for response in watch:
            if response.instances[0].reason == pb.REASON_ENGINE_NOT_RESPONDING:
                break
        assert response.instances[0].status == pb.STATUS_DEFERRED
        agent.publish(revision_decided=0, revision_applied=0, status=int(Status.DEFERRED),
                      reason=int(Reason.SHRINKING))  # fmt: skip
        assert next(watch).instances[0].reason == pb.REASON_WAITING_FOR_ENGINE
        # It rang for something else, and the limit is still not taken up.
        assert next(watch).instances[0].reason == pb.REASON_ENGINE_NOT_RESPONDING
        watch.cancel()


def test_a_welcome_without_an_answer_shows(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 5, create=True)
    with connected(daemon_process) as agent, daemon_process.stub("read") as stub:
        watch = stub.Watch(pb.WatchRequest(names=["a"]), timeout=TIMEOUT)
        agent.hello("a")
        agent.publish(ring=False, revision_decided=0, revision_applied=0)
        assert any(now.instances[0].reason == pb.REASON_ENGINE_NOT_RESPONDING for now in watch)
        watch.cancel()


ENGINE = """
import os, signal, sys
from pathlib import Path
from tests.support.daemon import FakeAgent

agent = FakeAgent(Path(sys.argv[1]))
assert agent.hello("a")["kind"] == "welcome"
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


def test_an_engine_killed_while_a_forked_child_lives_is_gone_and_its_name_free(
    daemon_process: DaemonProcess,
) -> None:
    command = [sys.executable, "-c", ENGINE, str(daemon_process.agent_socket)]
    daemon_process.set("a", 5, create=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            assert daemon_process.get("a").pid == engine.pid
            engine.kill()
            engine.wait(TIMEOUT)
            # Probed first: the name is free at once, whatever the daemon has seen by now.
            with connected(daemon_process) as agent:
                assert agent.hello("a")["kind"] == "welcome"
            wait_gone(daemon_process, "a")
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
    assert daemon_process.get("a").limit_bytes == 5


def test_a_killed_engine_is_seen_as_gone_with_nobody_asking(daemon_process: DaemonProcess) -> None:
    command = [sys.executable, "-c", ENGINE, str(daemon_process.agent_socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        try:
            engine.kill()
            wait_gone(daemon_process, "a")
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_name_in_use_stays_with_its_holder(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as first:
        first.hello("a")
        with connected(daemon_process) as second:
            answer = second.hello("a")
            assert (answer["kind"], answer["code"]) == ("refused", "name_in_use")
            assert str(os.getpid()) in answer["message"]
            assert "KVQUOTA_INSTANCE" in answer["message"]
        daemon_process.set("a", 5)
        first.wait_ring()
        assert first.desired().limit_bytes == 5


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from tests.support.daemon import FakeAgent

os.setgroups([4242])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
answer = FakeAgent(Path(sys.argv[1])).hello("stranger")
print(answer["kind"], answer.get("code"))
"""
STRANGER = 65534


def join_as_stranger(daemon: DaemonProcess) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    daemon.root.chmod(0o755)
    command = [sys.executable, "-c", AS_ANOTHER_USER, str(daemon.agent_socket), str(STRANGER)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout.strip()


def test_another_users_process_is_refused(daemon_process: DaemonProcess) -> None:
    assert join_as_stranger(daemon_process) == "refused not_allowed"
    assert f"uid {STRANGER} may not join" in daemon_process.log


@pytest.mark.parametrize("options", [["--agent-user", str(STRANGER)], ["--agent-group", "4242"]])
def test_another_user_joins_where_the_configuration_says_so(short_dir: Path, options: list[str]) -> None:
    daemon = DaemonProcess(short_dir, options=options)
    daemon.start()
    try:
        assert join_as_stranger(daemon) == "welcome None"
    finally:
        daemon.kill()


def test_doorbells_make_one_change_each_at_most(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent, daemon_process.stub("read") as stub:
        agent.hello("a")
        watch: Any = stub.Watch(pb.WatchRequest(names=["a"]), timeout=TIMEOUT)
        assert next(watch).snapshot
        for pages in range(1, 6):
            agent.publish(mapped_pages=10 + pages)
            assert next(watch).instances[0].mapped_bytes == (10 + pages) * PAGE
        watch.cancel()


def test_without_descriptors_left_the_daemon_lives_and_goes_on_when_there_are_some(
    daemon_process: DaemonProcess,
) -> None:
    with connected(daemon_process) as first:
        first.hello("first")
        limits = resource.prlimit(daemon_process.pid, resource.RLIMIT_NOFILE)
        open_now = len(os.listdir(f"/proc/{daemon_process.pid}/fd"))
        # Room for a connection and its pidfd, and not for segments; then not even for a connection.
        for room, said in ((2, "code=too_many"), (0, "accept_failed")):
            resource.prlimit(daemon_process.pid, resource.RLIMIT_NOFILE, (open_now + room, limits[1]))
            with connected(daemon_process) as second:
                second.say(HELLO)
                until("the log says so", lambda said=said: said in daemon_process.log)  # type: ignore[misc]
        resource.prlimit(daemon_process.pid, resource.RLIMIT_NOFILE, limits)
        assert daemon_process.get("first").connected
        serves_others(daemon_process)


def test_names_that_were_never_limited_are_not_kept_for_ever(daemon_process: DaemonProcess) -> None:
    daemon_process.set("limited", 5, create=True)
    for number in range(MAX_FORGETTABLE + 10):
        with connected(daemon_process) as agent:
            agent.hello(f"engine-{number}")
    with daemon_process.stub("read") as stub:

        def known() -> list[str]:
            listed = stub.ListInstances(pb.ListInstancesRequest(), timeout=TIMEOUT).instances
            return [instance.name for instance in listed]

        until("the oldest are forgotten", lambda: len(known()) == MAX_FORGETTABLE + 1)
        assert "engine-0" not in known()
        assert {"limited", f"engine-{MAX_FORGETTABLE + 9}"} <= set(known())


def test_no_descriptor_is_left_by_engines_that_went(daemon_process: DaemonProcess) -> None:
    serves_others(daemon_process)
    before = len(os.listdir(f"/proc/{daemon_process.pid}/fd"))
    for _ in range(20):
        serves_others(daemon_process)
    until("all are closed", lambda: len(os.listdir(f"/proc/{daemon_process.pid}/fd")) <= before)


def test_a_stopped_daemon_hangs_up(daemon_process: DaemonProcess) -> None:
    with connected(daemon_process) as agent:
        agent.hello("a")
        assert daemon_process.stop() == 0
        poll = select.poll()
        poll.register(agent.sock, select.POLLRDHUP)
        assert poll.poll(TIMEOUT * 1000)
