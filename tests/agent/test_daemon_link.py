import ctypes
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kvquota.agent.daemon_link import DaemonLink, RefusedError, Standing
from kvquota.native import Desired, packet
from kvquota.native.status import Reason, Status

from tests.agent.fake_daemon import TIMEOUT, Connection, FakeDaemon
from tests.agent.rig import PAGE, AgentRig
from tests.support.daemon import until

Make = Callable[..., AgentRig]


def says(revision: int, limit_bytes: int | None) -> Callable[[Connection], None]:
    """A daemon that has this spec when the agent comes."""

    def answer(connection: Connection) -> None:
        connection.desired.write(Desired(revision=revision, limit_bytes=limit_bytes))
        connection.welcome()

    return answer


def test_an_engine_joins_a_daemon_that_comes_later_and_comes_under_its_spec(
    socket_path: Path, rig: Make
) -> None:
    engine = rig()
    engine.fill(8)
    with FakeDaemon(socket_path, answer=says(4, 2 * PAGE)) as daemon:
        connection = daemon.connection()
        observed = connection.wait(lambda seen: seen.revision_applied == 4, engine.turn)
        assert observed.mapped_pages == 2
        engine.close()


def test_a_default_limit_is_told_to_a_daemon_that_comes_later(socket_path: Path, rig: Make) -> None:
    engine = rig(default_limit=5 * PAGE)
    with FakeDaemon(socket_path) as daemon:
        hello = daemon.connection().hello
        assert (hello["base"], hello["revision"], hello["limit_bytes"]) == (None, 0, 5 * PAGE)
        engine.close()


def test_a_daemon_that_restarts_finds_the_limit_in_force_and_a_newer_one_counts(
    socket_path: Path, rig: Make
) -> None:
    with FakeDaemon(socket_path, answer=says(3, 6 * PAGE)) as first:
        engine = rig()
        first.connection()
        engine.fill(6)
    # No daemon: the last limit stays in force, and the engine serves.
    engine.turn()
    assert engine.agent.statistics().limit_bytes == 6 * PAGE
    with FakeDaemon(socket_path, answer=says(9, 2 * PAGE)) as second:
        connection = second.connection()
        hello = connection.hello
        assert (hello["base"], hello["revision"], hello["limit_bytes"]) == (3, 3, 6 * PAGE)
        observed = connection.wait(lambda seen: seen.revision_applied == 9, engine.turn)
        assert observed.mapped_pages == 2
        engine.close()


def test_the_log_has_one_line_when_a_daemon_is_lost_and_one_when_it_is_found(
    socket_path: Path, rig: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvquota")
    with FakeDaemon(socket_path, answer=says(3, 6 * PAGE)) as first:
        engine = rig()
        first.connection()
    until("it tried again", lambda: "No such file" in caplog.text)
    with FakeDaemon(socket_path) as second:
        second.connection()
        until("it is found", lambda: "found" in caplog.text)
        engine.close()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert lines == [
        f"kvquota: instance test: 16 pages of {PAGE} bytes, limit {6 * PAGE} bytes, "
        f"with the daemon at {socket_path}",
        f"kvquota: lost the daemon at {socket_path}: its last limit stays in force",
        f"kvquota: found the daemon at {socket_path}, boot boot",
    ]


def test_a_daemon_that_dies_with_rings_unread_is_lost_like_any_other(
    daemon: FakeDaemon, rig: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = rig()
    connection = daemon.connection()
    connection.limit(5 * PAGE, 1)
    # The rings that say so are never read: the connection ends with a reset.
    engine.until(lambda: connection.read().revision_applied == 1)
    connection.sock.close()
    until("it is noticed", lambda: caplog.messages)
    assert "its last limit stays in force" in caplog.messages[0]


def test_a_lower_revision_is_never_acted_on(socket_path: Path, rig: Make) -> None:
    with FakeDaemon(socket_path, answer=says(3, 6 * PAGE)) as first:
        engine = rig()
        first.connection()
        engine.fill(6)
    with FakeDaemon(socket_path, answer=says(2, 1 * PAGE)) as second:
        connection = second.connection()
        observed = connection.wait(lambda seen: seen.revision_decided == 3, engine.turn)
        assert (observed.limit_bytes, observed.mapped_pages) == (6 * PAGE, 6)
        connection.limit(4 * PAGE, 4)
        connection.wait(lambda seen: seen.revision_applied == 4, engine.turn)
        engine.close()


def test_the_engine_thread_goes_on_while_the_daemon_is_stopped_from_answering(
    daemon: FakeDaemon, rig: Make
) -> None:
    engine = rig()
    connection = daemon.connection()
    # Nobody reads the rings: many changes of status fill the queue, and no step blocks.
    for revision in range(1, 2000):
        connection.desired.write(Desired(revision=revision, limit_bytes=None))
        engine.step()
    assert connection.read().revision_applied == 1999


@pytest.mark.parametrize("said", [b"\xff", b'{"kind":"hello"}', b"x" * 5000])
def test_a_daemon_that_talks_nonsense_does_not_hurt_the_engine(
    daemon: FakeDaemon, rig: Make, said: bytes
) -> None:
    engine = rig()
    connection = daemon.connection()
    connection.sock.send(said)
    engine.turn()
    if len(said) > packet.MAX_BYTES:
        # Nothing of such a packet can be trusted: the agent hangs up and comes again.
        again = daemon.connection()
        again.wait(lambda seen: seen.status == Status.APPLIED, engine.turn)
    else:
        connection.limit(PAGE, 1)
        connection.wait(lambda seen: seen.revision_applied == 1, engine.turn)


def test_a_segment_left_locked_is_reported_and_the_last_limit_stays(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    connection.limit(5 * PAGE, 1)
    connection.wait(lambda seen: seen.revision_applied == 1, engine.turn)
    # The daemon's own mapping is the only writable one, so the lock word is broken through it.
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "kvquota-desired" in line and " rw-s " in line:
            address = int(line.split("-")[0], 16)
    ctypes.c_int64.from_address(address + 64).value += 1
    packet.ring(connection.sock)
    connection.wait(lambda seen: seen.reason == Reason.SEGMENT_UNREADABLE, engine.step)
    assert engine.agent.statistics().limit_bytes == 5 * PAGE
    ctypes.c_int64.from_address(address + 64).value += 1
    connection.limit(4 * PAGE, 2)
    connection.wait(lambda seen: seen.revision_applied == 2, engine.turn)
    assert connection.standing() == (Status.APPLIED, Reason.NONE)


def test_a_limit_below_zero_is_reported_and_the_last_one_stays(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    connection.limit(5 * PAGE, 1)
    connection.wait(lambda seen: seen.revision_applied == 1, engine.turn)
    connection.limit(-1, 2)
    connection.wait(lambda seen: seen.reason == Reason.SEGMENT_UNREADABLE, engine.turn)
    assert engine.agent.statistics().limit_bytes == 5 * PAGE
    connection.limit(4 * PAGE, 3)
    connection.wait(lambda seen: seen.revision_applied == 3, engine.turn)


@pytest.mark.parametrize("known", [True, None], ids=["a daemon that takes it", "an older daemon"])
def test_an_agent_that_closes_says_bye_to_a_daemon_that_takes_it(
    socket_path: Path, rig: Make, known: bool | None
) -> None:
    with FakeDaemon(socket_path, answer=lambda connection: connection.welcome(bye=known)) as daemon:
        agent = rig().agent
        connection = daemon.connection()
        agent.close()
        connection.sock.settimeout(TIMEOUT)
        said = []
        while (came := packet.receive(connection.sock)) is not None:
            said.append(came.payload)
        assert [json.loads(payload) for payload in said if payload != packet.DOORBELL] == (
            [{"kind": "bye"}] if known else []
        )


def test_a_forked_child_does_not_hold_the_connection(daemon: FakeDaemon, rig: Make) -> None:
    engine = rig()
    connection = daemon.connection()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        engine.close()
        connection.sock.settimeout(10)
        while connection.sock.recv(16) == packet.DOORBELL:
            pass
        # The agent hung up while its child lives.
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for fd in (*ready, *go):
            os.close(fd)


def test_a_socket_file_that_nobody_listens_at_is_no_daemon(socket_path: Path, rig: Make) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(socket_path))
    engine = rig()
    engine.fill(1)
    socket_path.unlink()
    with FakeDaemon(socket_path) as daemon:
        daemon.connection().wait(lambda seen: seen.status == Status.APPLIED, engine.turn)
        engine.close()


def test_a_daemon_that_refuses_before_hello_is_heard(socket_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(socket_path))
    listener.listen()

    def refused_meanwhile() -> Standing:
        connection, _ = listener.accept()
        packet.send(connection, packet.encode({"kind": "refused", "code": "not_allowed", "message": "uid 7"}))
        connection.close()
        return Standing(None, 0, None)

    link = DaemonLink(socket_path, "test", "model 1", refused_meanwhile)
    assert link.step() is False
    with pytest.raises(RefusedError, match="uid 7"):
        link.step()
    link.close()
    listener.close()
