import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvquota.agent.daemon_link import DaemonLink, Session, Standing
from kvquota.agent.watcher import Watcher

from tests.agent.fake_daemon import FakeDaemon
from tests.agent.rig import PAGE, TIMEOUT, AgentRig

Make = Callable[..., AgentRig]


def test_an_idle_agent_wakes_for_nothing(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig(reserve=4)
    connection = daemon.connection()
    engine.until(lambda: engine.agent.statistics().credits == 4)
    engine.until(lambda: not engine.agent._inbox)
    watcher = engine.agent._watcher
    assert watcher._thread is not None
    task = Path(f"/proc/self/task/{watcher._thread.native_id}/status")

    def status(key: str) -> str:
        return next(line for line in task.read_text().splitlines() if line.startswith(key))

    engine.turn()
    engine.until(lambda: "sleeping" in status("State"))
    before, woken = status("voluntary"), engine.adapter.woken
    # A window in which other things happen: another thread sleeps and is woken 200 times.
    turns = [threading.Event() for _ in range(200)]
    other = threading.Thread(target=lambda: [turn.wait(TIMEOUT) for turn in turns])
    other.start()
    for turn in turns:
        turn.set()
        engine.step()
    other.join(TIMEOUT)
    assert status("voluntary") == before
    assert engine.adapter.woken == woken
    # And the thread that slept through it is alive.
    connection.limit(PAGE, 1)
    assert engine.adapter.rung.wait(TIMEOUT)


def test_a_watcher_stops_and_can_be_started_again(socket_path: Path) -> None:
    woken = threading.Event()
    standing = Standing(None, 0, None)
    with FakeDaemon(socket_path) as daemon:
        link = DaemonLink(socket_path, "test", "model 1", lambda: standing)
        watcher = Watcher(link, [], woken.set)
        watcher.start()
        connection = daemon.connection()
        assert woken.wait(TIMEOUT)
        session = watcher.inbox.popleft()
        assert isinstance(session, Session)
        watcher.stop()
        watcher.stop()
        watcher.start()
        with pytest.raises(RuntimeError):
            watcher.start()
        woken.clear()
        watcher.inbox.clear()
        connection.limit(5, 1)
        assert woken.wait(TIMEOUT)
        assert list(watcher.inbox) == [True]
        watcher.stop()
        session.close()


def test_a_wake_that_fails_does_not_end_the_watcher(
    daemon: FakeDaemon, rig: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig()
    connection = daemon.connection()
    wake, failed = engine.adapter.wake, threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("the loop is closed")

    engine.agent._watcher._wake = fail
    connection.limit(2 * PAGE, 1)
    assert failed.wait(TIMEOUT)
    engine.agent._watcher._wake = wake
    connection.limit(PAGE, 2)
    assert engine.adapter.rung.wait(TIMEOUT)
    assert "the loop is closed" in caplog.text


def test_it_stops_while_it_waits_for_a_daemon_that_never_answers(socket_path: Path) -> None:
    with FakeDaemon(socket_path, answer=lambda _: None) as daemon:
        link = DaemonLink(socket_path, "test", "model 1", lambda: Standing(None, 0, None))
        watcher = Watcher(link, [], lambda: None)
        watcher.start()
        daemon.connection()
        watcher.stop()
        link.close()


def test_an_alarm_makes_the_engine_look_again_once() -> None:
    woken = threading.Event()
    link = DaemonLink(Path("/nonexistent/agent.sock"), "test", "model 1", lambda: Standing(None, 0, None))
    watcher = Watcher(link, [], woken.set)
    watcher.start()
    watcher.alarm(0.0)
    assert woken.wait(TIMEOUT)
    watcher.stop()
    assert list(watcher.inbox) == [True]


def test_refused_credits_are_asked_for_again_while_a_request_waits(socket_path: Path, rig: Make) -> None:
    with FakeDaemon(socket_path, capacity=2 * PAGE) as daemon:
        engine = rig()
        other = AgentRig(socket_path)
        daemon.connection()
        daemon.connection()
        other.fill(2)
        engine.adapter.wants = 1
        engine.step()
        engine.until(lambda: engine.agent._balloon.retry_at is not None)
        assert engine.adapter.allowed == 0
        other.close()
        engine.until(lambda: engine.adapter.allowed == 1)
        engine.close()
