import gc
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from kvquota.agent import policy
from kvquota.agent.contract import Counters, PageCommand
from kvquota.agent.local_rank import LocalRank
from kvquota.agent.settings import SettingError
from kvquota.native import Desired
from kvquota.native.status import Reason, Status

from tests.agent.fake_daemon import Connection, FakeDaemon
from tests.agent.rig import PAGE, AgentRig

Make = Callable[..., AgentRig]


def open_links() -> Counter[str]:
    """This process's sockets, events and segments. (A driver's memory lives as long as the driver.)"""
    gc.collect()  # what earlier tests dropped in cycles
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            kinds[os.readlink(f"/proc/self/fd/{fd}").split("[")[0].split("(")[0].rstrip(" :")] += 1
    others = ("/proc", "/memfd:kvquota-granules", "/memfd:kvquota-device")
    return Counter({kind: kinds[kind] for kind in kinds if not kind.startswith(others)})


def test_without_a_daemon_an_engine_runs_unlimited(rig: Make) -> None:
    engine = rig()
    engine.fill(12)
    assert engine.agent.statistics().mapped_pages == 12
    assert engine.agent.statistics().limit_bytes is None


def test_without_a_daemon_the_default_limit_is_in_force_from_the_first_page_on(rig: Make) -> None:
    engine = rig(default_limit=3 * PAGE, reserve=8)
    engine.until(lambda: engine.adapter.allowed == 3)
    assert engine.agent.statistics().target_pages == 3


def test_a_driver_that_failed_once_is_asked_again_and_leaves_no_mark(
    rig: Make, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig()
    connection = daemon.connection()
    engine.faults.fail("mem_create", nth=2, times=3)
    engine.fill(4)
    assert engine.faults.calls("mem_create") > 4
    engine.faults.fail("mem_unmap", times=14)
    connection.limit(PAGE, 1)
    connection.wait(lambda seen: seen.status == Status.APPLIED and seen.revision_applied == 1, engine.turn)
    # While a page stays, another one goes in its place.
    assert engine.arena.report().held_bytes <= PAGE
    assert connection.read().quarantined_pages == 0
    assert "mem_create failed with EIO (5) for a credit" in caplog.text


def test_a_limit_set_before_the_engine_is_in_force_from_the_first_page_on(
    socket_path: Path, rig: Make
) -> None:
    def answer(connection: Connection) -> None:
        connection.desired.write(Desired(revision=7, limit_bytes=2 * PAGE))
        connection.welcome()

    with FakeDaemon(socket_path, answer=answer) as daemon:
        engine = rig(reserve=8)
        connection = daemon.connection()
        assert connection.hello == {
            "kind": "hello",
            "min_version": 1,
            "max_version": 1,
            "instance": "test",
            "engine": "model 1",
            "pid_reported": os.getpid(),
            "base": None,
            "revision": 0,
            "limit_bytes": None,
            "wakes": True,
        }
        engine.until(lambda: engine.adapter.allowed == 2)
        assert connection.read().revision_decided == 7
        engine.close()


def test_an_idle_engine_shrinks_when_told_and_reports_it(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    engine.fill(8)
    memory = os.fstat(engine.driver.fileno())
    assert memory.st_blocks * 512 == 8 * PAGE
    connection.limit(3 * PAGE, 1)
    assert engine.adapter.rung.wait(10)
    observed = connection.wait(lambda seen: seen.revision_applied == 1, engine.turn)
    assert os.fstat(engine.driver.fileno()).st_blocks * 512 == 3 * PAGE
    assert (observed.mapped_pages, observed.evictable_pages, observed.retiring_pages) == (3, 3, 0)
    assert observed.limit_bytes == 3 * PAGE
    assert observed.decided_at_ns <= observed.applied_at_ns
    assert connection.standing() == (Status.APPLIED, Reason.NONE)
    assert not engine.needs_step()


def test_what_the_last_step_freed_is_shown_once_the_engine_is_idle(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    engine.fill(4)
    engine.adapter.become("pinned", *engine.adapter.pages)
    engine.step()
    assert connection.read().pinned_pages == 4
    engine.adapter.become("evictable", *engine.adapter.pages)
    assert not engine.needs_step()
    assert (connection.read().pinned_pages, connection.read().evictable_pages) == (0, 4)


def test_nothing_makes_an_idle_engine_step_while_only_a_pin_is_awaited(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    engine.fill(4)
    pinned = list(engine.adapter.pages)
    engine.adapter.become("pinned", *pinned)
    connection.limit(0, 1)
    connection.wait(lambda seen: seen.revision_decided == 1, engine.turn)
    assert not engine.needs_step()
    assert connection.standing() == (Status.DEFERRED, Reason.PINNED_BY_RUNNING_REQUESTS)
    assert connection.read().draining_pages == 4
    engine.adapter.become("empty", *pinned)
    assert engine.needs_step()
    connection.wait(lambda seen: seen.revision_applied == 1, engine.turn)
    assert os.fstat(engine.driver.fileno()).st_blocks == 0


def test_memory_of_the_device_is_taken_against_its_record(socket_path: Path, rig: Make) -> None:
    with FakeDaemon(socket_path, capacity=5 * PAGE) as daemon:
        engine = rig()
        connection = daemon.connection()
        engine.adapter.wants = 9
        engine.step()
        engine.until(lambda: engine.adapter.allowed == 5)
        assert daemon.record.used_bytes == 5 * PAGE
        assert connection.read().credits == 5
        # Another process gives memory back: what waits is asked for again, with no limit changed.
        engine.adapter.grow(5)
        engine.step()
        assert engine.agent.statistics().credits == 0
        engine.close()


def _no_record(connection: Connection) -> None:
    desired, observed = connection.desired.fileno(), connection.observed.fileno()
    connection.welcome(fds=[desired, observed, desired])


def test_memory_that_the_device_does_not_count_is_shown(socket_path: Path, rig: Make) -> None:
    with FakeDaemon(socket_path, answer=_no_record) as daemon:
        engine = rig()
        assert daemon.connection().standing() == (Status.DEGRADED, Reason.RANK_FAILED)
        engine.fill(2)
        engine.close()


def test_a_rank_whose_link_is_full_is_attached_later(
    daemon: FakeDaemon, rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = LocalRank.attach
    tries: list[int] = []

    def full_at_first(rank: LocalRank, record_fd: int) -> None:
        tries.append(record_fd)
        if len(tries) < 3:
            raise BlockingIOError("the link is full")
        attach(rank, record_fd)

    monkeypatch.setattr(LocalRank, "attach", full_at_first)
    engine = rig()
    connection = daemon.connection()
    assert connection.standing() == (Status.DEGRADED, Reason.RANK_FAILED)
    engine.fill(2)
    connection.wait(lambda seen: seen.status == Status.APPLIED, engine.turn)
    assert len(tries) == 3
    assert daemon.record.used_bytes == 2 * PAGE


def test_what_the_daemon_reads_in_the_midst_of_a_step_adds_up(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig(reserve=4)
    connection = daemon.connection()
    engine.until(lambda: engine.adapter.allowed == 4)
    seen = []

    def counters() -> Counters:
        now = connection.read()
        seen.append((now.mapped_pages, now.pinned_pages + now.evictable_pages + now.warm_pages))
        return Counters()

    engine.adapter.counters = counters  # type: ignore[method-assign]
    engine.agent.begin_step()
    engine.adapter.grow(3)
    engine.rank.apply(engine.agent.end_step() or PageCommand(0))
    assert seen
    assert all(mapped == parts for mapped, parts in seen), seen


def test_requests_that_wait_are_shown_while_nothing_else_changes(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    engine.adapter.counters = lambda: Counters(requests_waiting=2, requests_blocked=2)  # type: ignore[method-assign]
    engine.step()
    assert not engine.needs_step()
    assert (connection.read().requests_waiting, connection.read().requests_blocked) == (2, 2)


def test_growth_for_a_running_request_is_had_within_the_wait(rig: Make) -> None:
    engine = rig()
    engine.agent.begin_step()
    assert engine.agent.grow_now(3, timeout=5.0) == 3
    grown = engine.adapter.grow(3)
    command = engine.agent.end_step()
    assert command is not None
    assert command.maps == tuple(grown)
    engine.rank.apply(command)


def test_an_idle_engine_lets_its_reserve_go_and_has_it_again_with_its_first_step(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_HALVING_NS", 1_000_000)
    engine = rig(reserve=4)
    engine.until(lambda: engine.arena.report().created == 4)
    engine.until(lambda: engine.arena.report().held_bytes == 0)
    engine.adapter.is_busy = True
    engine.step()
    assert engine.arena.wait_credits(8, timeout=10.0) == 8
    engine.adapter.wants = 1
    engine.step()
    assert engine.arena.wait_credits(9, timeout=10.0) == 9
    assert engine.arena.report().held_bytes == 5 * PAGE


def test_what_grew_before_a_wait_for_more_is_mapped_with_the_step(rig: Make) -> None:
    engine = rig(reserve=1)
    engine.until(lambda: engine.adapter.allowed == 1)
    assert engine.step() is None
    engine.agent.begin_step()
    grown = engine.adapter.grow(1)
    engine.agent.grow_now(1, timeout=5.0)
    command = engine.agent.end_step()
    assert command is not None
    assert command.maps == tuple(grown)
    engine.rank.apply(command)


@pytest.mark.parametrize("code", ["version", "not_allowed", "bad_hello"])
def test_a_daemon_that_refuses_ends_the_start_with_its_reason(
    socket_path: Path, rig: Make, code: str
) -> None:
    with (
        FakeDaemon(socket_path, answer=lambda connection: connection.refuse(code, "because")),
        pytest.raises(SettingError, match=f"'test'.*{code}, because"),
    ):
        rig()


def test_a_name_in_use_is_tried_again_and_then_names_the_variable(socket_path: Path, rig: Make) -> None:
    answers: list[str] = []

    def answer(connection: Connection) -> None:
        answers.append(connection.hello["instance"])
        connection.refuse("name_in_use", "pid 1 has it")

    with (
        FakeDaemon(socket_path, answer=answer),
        pytest.raises(SettingError, match=r"KVQUOTA_INSTANCE.*pid 1"),
    ):
        rig()
    assert len(answers) > 2


@pytest.mark.parametrize("code", ["name_in_use", "too_many"])
def test_a_daemon_that_takes_the_engine_a_little_later_is_joined(
    socket_path: Path, rig: Make, code: str
) -> None:
    answers: list[str] = []

    def answer(connection: Connection) -> None:
        answers.append("")
        if len(answers) < 3:
            connection.refuse(code)
        else:
            connection.welcome()

    with FakeDaemon(socket_path, answer=answer):
        rig().close()
    assert len(answers) == 3


def _two_desired(connection: Connection) -> None:
    fds = [connection.desired.fileno(), connection.desired.fileno(), connection.record.fileno()]
    connection.welcome(fds=fds)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda connection: connection.welcome(version=2), "version 2"),
        (lambda connection: connection.welcome(device="tpu"), "tpu"),
        (lambda connection: connection.welcome(boot_id=7), "boot_id"),
        (lambda connection: connection.welcome(kind="hi"), "'hi'"),
        (lambda connection: connection.welcome(fds=[]), "0 descriptors"),
        (lambda connection: connection.welcome(fds=[connection.desired.fileno()]), "1 descriptors"),
        (lambda connection: connection.sock.send(b"\xff"), "JSON"),
        (_two_desired, "observed"),
    ],
)
def test_an_answer_that_is_none_of_a_daemon_ends_the_start(
    socket_path: Path, rig: Make, answer: Callable[[Connection], None], said: str
) -> None:
    before = open_links()
    with FakeDaemon(socket_path, answer=answer), pytest.raises(SettingError) as caught:
        rig()
    assert said in str(caught.value)
    assert "KVQUOTA_AGENT_SOCKET" in str(caught.value)
    assert open_links() == before


def test_a_socket_of_another_kind_is_named(socket_path: Path, rig: Make) -> None:
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(socket_path))
        control.listen()
        with pytest.raises(SettingError, match=r"expected a daemon's agent\.sock"):
            rig()


def test_a_daemon_that_says_nothing_does_not_keep_an_engine_from_starting(
    socket_path: Path, rig: Make
) -> None:
    with FakeDaemon(socket_path, answer=lambda _: None):
        engine = rig()
        engine.fill(1)
        engine.close()


def test_a_path_too_long_for_a_socket_is_named(rig: Make, socket_path: Path) -> None:
    with pytest.raises(SettingError, match="107 bytes"):
        AgentRig(socket_path / ("x" * 120))


def test_closing_twice_leaves_no_thread_and_no_descriptor(socket_path: Path) -> None:
    before = open_links()
    with FakeDaemon(socket_path) as daemon:
        engine = AgentRig(socket_path, reserve=4)
        connection = daemon.connection()
        engine.close()
        engine.agent.close()
        assert connection.sock.recv(1) in (b"", b"!")
    del engine
    assert open_links() == before


def test_the_agent_imports_nothing_that_an_engine_pins() -> None:
    pinned = "grpc google.protobuf click cupy torch numpy"
    code = f"import kvquota.agent, sys; print([m for m in {pinned!r}.split() if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
