"""Watch: a snapshot, then changes; and a reader that stops reading costs nobody anything."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import PAGE, TIMEOUT, DaemonProcess, FakeAgent, until


@contextmanager
def watching(daemon: DaemonProcess, *names: str) -> Iterator[Any]:
    with daemon.stub("read") as stub:
        watch = stub.Watch(pb.WatchRequest(names=names), timeout=TIMEOUT)
        try:
            yield watch
        finally:
            watch.cancel()


def test_a_snapshot_then_every_change(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 5, create=True)
    with watching(daemon_process) as watch:
        first = next(watch)
        assert first.snapshot
        assert [(one.name, one.limit_bytes) for one in first.instances] == [("a", 5)]
        daemon_process.set("b", 6, create=True)
        second = next(watch)
        assert not second.snapshot
        assert [(one.name, one.limit_bytes) for one in second.instances] == [("b", 6)]
        agent = FakeAgent(daemon_process.agent_socket)
        agent.hello("a")
        assert next(watch).instances[0].connected
        agent.publish()
        assert next(watch).instances[0].mapped_bytes == 10 * PAGE
        agent.close()
        assert next(watch).instances[0].status == pb.STATUS_UNAVAILABLE


def test_only_the_names_that_were_asked_for(daemon_process: DaemonProcess) -> None:
    daemon_process.set("a", 5, create=True)
    with watching(daemon_process, "b", "c") as watch:
        assert not next(watch).instances
        daemon_process.set("a", 6)
        daemon_process.set("b", 7, create=True)
        assert [one.name for one in next(watch).instances] == ["b"]


def test_a_reader_that_stops_reading_gets_the_newest_state_and_slows_nobody(
    daemon_process: DaemonProcess,
) -> None:
    agent = FakeAgent(daemon_process.agent_socket)
    agent.hello("a" * 100)
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(f"unix:{daemon_process.runtime_dir}/read.sock", options=options) as channel:
        call = channel.unary_stream(
            "/kvquota.v1.Quota/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )
        watch = call(pb.WatchRequest(), timeout=TIMEOUT)
        assert next(watch).snapshot
        changes = 5000
        for number in range(1, changes + 1):
            agent.publish(step=number, blocks_evicted=number)
            if number % 100 == 0:
                assert daemon_process.get("a" * 100).blocks_evicted_total == number
        seen = 0
        for response in watch:
            seen += 1
            if response.instances[0].blocks_evicted_total == changes:
                break
        # Coalesced: what it did not read in time was not kept for it.
        assert seen < changes / 10
        watch.cancel()
    agent.close()


def test_a_watch_ends_with_a_clear_status_when_the_daemon_stops(daemon_process: DaemonProcess) -> None:
    agent = FakeAgent(daemon_process.agent_socket)
    agent.hello("a")
    ended: list[grpc.RpcError] = []

    def wait() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            daemon_process.set("a", 5, wait=True)
        ended.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    agent.wait_ring()
    with watching(daemon_process) as watch:
        assert next(watch).snapshot
        assert daemon_process.stop() == 0
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
    waiting.join(TIMEOUT)
    for error in (caught.value, *ended):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopping" in str(error.details())
    assert len(ended) == 1
    agent.close()


def test_watchers_that_leave_are_forgotten(daemon_process: DaemonProcess) -> None:
    """More watches one after another than may be open at a time."""
    with daemon_process.stub("read") as stub:
        for _ in range(300):
            watch = stub.Watch(pb.WatchRequest(), timeout=TIMEOUT)
            assert next(watch).snapshot
            watch.cancel()

        def served() -> bool:
            call = stub.ListInstances.future(pb.ListInstancesRequest(), timeout=TIMEOUT)
            return call.exception(TIMEOUT) is None

        until("a call is served", served)
