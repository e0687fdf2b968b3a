"""Limits over gRPC, against a real daemon: what is refused, what is kept, what a wait answers."""

import concurrent.futures
import mmap
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvquota.native.status import Reason, Status
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import PAGE, TIMEOUT, DaemonProcess, FakeAgent, until

GIB = 1 << 30


@contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[list[pb.Instance]]:
    """The call within fails with `code` and `words`; the list then holds the state that came along."""
    states: list[pb.Instance] = []
    with pytest.raises(grpc.RpcError) as caught:
        yield states
    error: Any = caught.value
    assert error.code() is code, error
    for word in words:
        assert word in error.details()
    for key, value in error.trailing_metadata() or ():
        if key == "kvquota-instance-bin":
            states.append(pb.Instance.FromString(value))


@pytest.fixture
def agent(daemon_process: DaemonProcess) -> Iterator[FakeAgent]:
    agent = FakeAgent(daemon_process.agent_socket)
    yield agent
    agent.close()


def test_a_name_never_seen_is_refused_with_its_near_matches(daemon_process: DaemonProcess) -> None:
    daemon_process.set("chat-large", 5, create=True)
    with refused(grpc.StatusCode.NOT_FOUND, "'chat-larg'", "did you mean chat-large?"):
        daemon_process.set("chat-larg", 5)
    with refused(grpc.StatusCode.NOT_FOUND, "'other'"):
        daemon_process.get("other")
    with refused(grpc.StatusCode.NOT_FOUND, "'xxx"):
        daemon_process.get("x" * 20_000)
    with daemon_process.stub() as stub:
        listed = stub.ListInstances(pb.ListInstancesRequest(), timeout=TIMEOUT)
    assert [instance.name for instance in listed.instances] == ["chat-large"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"limit_bytes": -1}, ["-1"]),
        ({"name": "../x"}, ["'../x'"]),
        ({"name": ""}, ["''"]),
        ({"name": "x" * 20_000}, ["'xxx"]),
        ({"revision": 9, "expected_revision": 7}, ["9", "7"]),
        ({"revision": -4}, ["-4"]),
        ({"revision": 2**40}, [str(2**40)]),
        ({"wait": True, "wait_timeout_ms": -1}, ["-1"]),
        ({"set_by": "x" * 129}, ["set_by"]),
        ({"set_by": "a\nb"}, ["set_by"]),
    ],
)
def test_bad_requests_change_nothing(
    shared_daemon: DaemonProcess, fields: dict[str, Any], words: list[str]
) -> None:
    before = shared_daemon.set("a", 5, create=True).instance
    with refused(grpc.StatusCode.INVALID_ARGUMENT, *words):
        shared_daemon.set(**({"name": "a", "limit": fields.pop("limit_bytes", 6), "create": True} | fields))
    assert shared_daemon.get("a") == before


def test_revisions_are_in_one_order(daemon_process: DaemonProcess) -> None:
    assert daemon_process.set("a", GIB, create=True, set_by="me").instance.revision == 1
    assert daemon_process.set("a", 5, revision=10).instance.revision == 10
    again = daemon_process.set("a", 5, revision=10).instance
    assert (again.revision, again.limit_bytes) == (10, 5)
    with refused(grpc.StatusCode.ABORTED, "revision 10") as state:
        daemon_process.set("a", 6, revision=10)
    assert [(now.revision, now.limit_bytes) for now in state] == [(10, 5)]
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "revision 9") as state:
        daemon_process.set("a", 5, revision=9)
    assert [now.revision for now in state] == [10]
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "revision 0") as state:
        daemon_process.set("a", 5, revision=0)
    assert [now.revision for now in state] == [10]
    assert daemon_process.set("new", None, revision=0, create=True).instance.revision == 0
    assert daemon_process.set("a", None, expected_revision=10).instance.revision == 11
    assert not daemon_process.get("a").HasField("limit_bytes")


def test_of_two_clients_with_one_expectation_one_wins(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 1, create=True)

    won, lost = [], []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for call in [
            pool.submit(daemon_process.set, "a", limit, expected_revision=1) for limit in range(100, 108)
        ]:
            if call.exception(TIMEOUT) is None:
                won.append(call.result().instance)
            else:
                with refused(grpc.StatusCode.ABORTED, "expected revision 1") as states:
                    call.result()
                lost.extend(states)
    now = daemon_process.get("a")
    assert now.revision == 2
    assert won == [now]
    assert lost == [now] * 7


def test_specs_survive_a_kill(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 0, create=True, set_by="me")
    daemon_process.set("b/dp1", None, create=True, revision=6)
    before = daemon_process.get("a"), daemon_process.get("b/dp1")
    daemon_process.kill()
    assert all(path.exists() for path in daemon_process.sockets)
    daemon_process.start()
    assert (daemon_process.get("a"), daemon_process.get("b/dp1")) == before


def test_a_corrupt_spec_does_not_stop_the_daemon(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 5, create=True)
    daemon_process.set("b", 6, create=True)
    daemon_process.stop()
    (daemon_process.state_dir / "a.json").write_text("{")
    daemon_process.start()
    assert daemon_process.get("b").limit_bytes == 6
    assert "a.json" in daemon_process.log
    with refused(grpc.StatusCode.NOT_FOUND):
        daemon_process.get("a")


@pytest.fixture
def tiny_disk(short_dir: Path) -> Iterator[Path]:
    """A state directory on a disk of a few pages."""
    path = short_dir / "state"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "kvquota-test", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(
            f"no right to mount a tmpfs ({made.stderr.strip()}): test_spec_store covers it by RLIMIT_FSIZE"
        )
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_leaves_the_old_limit_in_force(tiny_disk: Path, daemon_process: DaemonProcess) -> None:
    agent = FakeAgent(daemon_process.agent_socket)
    agent.hello("a")
    daemon_process.set("a", GIB)
    agent.wait_ring()
    rest = tiny_disk / "rest"
    with pytest.raises(OSError, match="No space"):
        rest.write_bytes(b"x" * (1 << 20))
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "'a'", "No space") as state:
        daemon_process.set("a", 5)
    assert [(now.revision, now.limit_bytes) for now in state] == [(1, GIB)]
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        daemon_process.set("new", 5, create=True)
    assert (agent.desired().revision, agent.desired().limit_bytes) == (1, GIB)
    with refused(grpc.StatusCode.NOT_FOUND):
        daemon_process.get("new")
    rest.unlink()
    assert daemon_process.set("a", 5).instance.revision == 2
    agent.wait_ring()
    assert agent.desired().limit_bytes == 5
    agent.close()
    daemon_process.stop()


def test_the_reading_socket_does_not_write(daemon_process: DaemonProcess) -> None:
    with daemon_process.stub("read") as stub, refused(grpc.StatusCode.PERMISSION_DENIED, "control.sock"):
        stub.SetLimit(pb.SetLimitRequest(name="a", limit_bytes=5, create=True), timeout=TIMEOUT)
    with daemon_process.stub("read") as stub:
        assert not stub.ListInstances(pb.ListInstancesRequest(), timeout=TIMEOUT).instances


def test_a_limit_reaches_the_engine_and_a_wait_ends_when_it_is_applied(
    daemon_process: DaemonProcess, agent: FakeAgent
) -> None:
    agent.hello("a")
    agent.publish()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(daemon_process.set, "a", 20 * PAGE, wait=True)
        agent.wait_ring()
        assert (agent.desired().revision, agent.desired().limit_bytes) == (1, 20 * PAGE)
        agent.publish(mapped_pages=30, pinned_pages=30, evictable_pages=0, warm_pages=0, revision_applied=0,
                      status=int(Status.DEFERRED), reason=int(Reason.PINNED_BY_RUNNING_REQUESTS))  # fmt: skip
        until_reason(daemon_process, pb.REASON_PINNED_BY_RUNNING_REQUESTS)
        assert not waiting.done()
        agent.publish()
        response = waiting.result(TIMEOUT)
    assert not response.timed_out
    assert (response.instance.status, response.instance.settled) == (pb.STATUS_APPLIED, True)
    assert response.instance.observed_revision == 1


def until_reason(daemon: DaemonProcess, reason: int) -> None:
    with daemon.stub("read") as stub:
        for response in stub.Watch(pb.WatchRequest(names=["a"]), timeout=TIMEOUT):
            if any(instance.reason == reason for instance in response.instances):
                return


def test_a_wait_ends_at_the_floor_too(daemon_process: DaemonProcess, agent: FakeAgent) -> None:
    agent.hello("a")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(daemon_process.set, "a", 0, wait=True)
        agent.wait_ring()
        agent.publish(mapped_pages=1, pinned_pages=1, evictable_pages=0, warm_pages=0, floor_pages=1,
                      revision_applied=0, status=int(Status.DEFERRED), reason=int(Reason.FLOOR))  # fmt: skip
        response = waiting.result(TIMEOUT)
    assert (response.instance.reason, response.instance.settled) == (pb.REASON_FLOOR, True)
    assert response.instance.limit_bytes == 0


def test_a_wait_ends_when_the_report_could_not_be_read_at_the_ring(
    daemon_process: DaemonProcess, agent: FakeAgent
) -> None:
    agent.hello("a")
    agent.publish()
    with daemon_process.stub() as stub, mmap.mmap(agent.fds[1], 4096) as segment:
        waiting = stub.SetLimit.future(
            pb.SetLimitRequest(name="a", limit_bytes=GIB, wait=True, wait_timeout_ms=60_000), timeout=TIMEOUT
        )
        agent.wait_ring()
        agent.publish(ring=False)
        # As a leader that lost its processor in the midst of a write.
        sequence = segment[64]
        segment[64] = sequence | 1
        agent.sock.send(b"!")
        until("it is read", lambda: not daemon_process.get("a").settled)
        segment[64] = sequence
        assert waiting.result(TIMEOUT).instance.status == pb.STATUS_APPLIED


def test_a_wait_has_a_time_out_of_its_own_and_answers_with_the_state(
    daemon_process: DaemonProcess, agent: FakeAgent
) -> None:
    agent.hello("a")
    response = daemon_process.set("a", 5, wait=True, wait_timeout_ms=50)
    assert response.timed_out
    assert (response.instance.status, response.instance.limit_bytes) == (pb.STATUS_DEFERRED, 5)
    assert daemon_process.set("a", 20 * PAGE, wait=True, wait_timeout_ms=0).timed_out
    agent.publish()
    assert not daemon_process.set("a", 20 * PAGE, revision=2, wait=True, wait_timeout_ms=0).timed_out


def test_a_wait_for_an_absent_engine_answers_at_once(daemon_process: DaemonProcess) -> None:
    response = daemon_process.set("a", 5, create=True, wait=True, wait_timeout_ms=3_600_000)
    assert not response.timed_out
    assert response.instance.status == pb.STATUS_UNAVAILABLE


def test_a_wait_ends_when_the_engine_goes(daemon_process: DaemonProcess, agent: FakeAgent) -> None:
    agent.hello("a")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(daemon_process.set, "a", 5, wait=True, wait_timeout_ms=3_600_000)
        agent.wait_ring()
        agent.close()
        assert waiting.result(TIMEOUT).instance.status == pb.STATUS_UNAVAILABLE


def test_a_superseded_wait_is_aborted_with_the_state(daemon_process: DaemonProcess, agent: FakeAgent) -> None:
    agent.hello("a")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(daemon_process.set, "a", 5, wait=True)
        agent.wait_ring()
        daemon_process.set("a", 6)
        with refused(grpc.StatusCode.ABORTED, "superseded") as state:
            waiting.result(TIMEOUT)
    assert [(now.revision, now.limit_bytes) for now in state] == [(2, 6)]


def test_cancelling_a_wait_undoes_nothing(daemon_process: DaemonProcess, agent: FakeAgent) -> None:
    agent.hello("a")
    with daemon_process.stub() as stub:
        waiting = stub.SetLimit.future(
            pb.SetLimitRequest(name="a", limit_bytes=5, wait=True), timeout=TIMEOUT
        )
        agent.wait_ring()
        waiting.cancel()
    assert daemon_process.get("a").limit_bytes == 5
    assert agent.desired().limit_bytes == 5


def test_the_same_revision_again_does_not_ring(daemon_process: DaemonProcess, agent: FakeAgent) -> None:
    agent.hello("a")
    daemon_process.set("a", 5, revision=3)
    agent.wait_ring()
    daemon_process.set("a", 5, revision=3)
    daemon_process.set("a", 6, revision=4)
    agent.wait_ring()
    agent.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        agent.sock.recv(1)
