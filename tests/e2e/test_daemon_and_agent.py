"""The real agent, over real memory, under a real daemon: what is set is what the memory does."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from kvquota.v1 import quota_pb2 as pb

from tests.agent.rig import PAGE, AgentRig
from tests.support.daemon import TIMEOUT, DaemonProcess, until


@contextmanager
def idle_loop(engine: AgentRig) -> Iterator[None]:
    """Run the engine's idle loop on its own thread, as an engine does."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            engine.turn()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(TIMEOUT)


@pytest.fixture
def engine(daemon_process: DaemonProcess) -> Iterator[AgentRig]:
    engine = AgentRig(daemon_process.agent_socket)
    yield engine
    engine.close()


def joined(daemon: DaemonProcess) -> bool:
    with daemon.stub("read") as stub:
        listed = stub.ListInstances(pb.ListInstancesRequest(), timeout=TIMEOUT).instances
    return any(instance.name == "test" and instance.connected for instance in listed)


def test_an_idle_engine_gives_memory_back_and_takes_it_again(
    daemon_process: DaemonProcess, engine: AgentRig
) -> None:
    engine.fill(12)
    assert daemon_process.get("test").mapped_bytes == 12 * PAGE
    with idle_loop(engine):
        for limit, mapped in ((4, 4), (1, 1), (0, 0)):
            response = daemon_process.set("test", limit * PAGE, wait=True)
            assert not response.timed_out, response
            assert (response.instance.status, response.instance.settled) == (pb.STATUS_APPLIED, True)
            assert response.instance.mapped_bytes == mapped * PAGE
            assert engine.arena.report().held_bytes == mapped * PAGE
        assert daemon_process.set("test", None, wait=True).instance.status == pb.STATUS_APPLIED
    engine.fill(12)
    shown = daemon_process.get("test")
    assert (shown.mapped_bytes, shown.status) == (12 * PAGE, pb.STATUS_APPLIED)


def test_a_daemon_that_was_killed_takes_its_engines_up_again(
    daemon_process: DaemonProcess, engine: AgentRig
) -> None:
    engine.fill(12)
    with idle_loop(engine):
        daemon_process.set("test", 6 * PAGE, wait=True)
        daemon_process.kill()
        daemon_process.start()
        until("the engine is back", lambda: joined(daemon_process))
        again = daemon_process.set("test", 6 * PAGE, revision=1, wait=True).instance
        assert (again.revision, again.mapped_bytes, again.status) == (1, 6 * PAGE, pb.STATUS_APPLIED)
        assert daemon_process.set("test", 2 * PAGE, wait=True).instance.mapped_bytes == 2 * PAGE


def test_a_spec_waits_for_its_engine(daemon_process: DaemonProcess) -> None:
    daemon_process.set("test", 3 * PAGE, create=True)
    engine = AgentRig(daemon_process.agent_socket, reserve=8)
    try:
        engine.until(lambda: engine.adapter.allowed == 3)
        shown = daemon_process.set("test", 3 * PAGE, revision=1, wait=True).instance
        assert (shown.status, shown.mapped_bytes) == (pb.STATUS_APPLIED, 3 * PAGE)
    finally:
        engine.close()


def test_limits_from_many_clients_end_in_the_last_one(
    daemon_process: DaemonProcess, engine: AgentRig
) -> None:
    engine.fill(12)
    with idle_loop(engine), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pages: daemon_process.set("test", pages * PAGE), [8, 3, 11, 5, 9, 2, 7, 10] * 5))
        last = daemon_process.set("test", 4 * PAGE, wait=True).instance
    assert (last.revision, last.observed_revision, last.status) == (41, 41, pb.STATUS_APPLIED)
    assert engine.arena.report().held_bytes <= 4 * PAGE
