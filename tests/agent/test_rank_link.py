import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kvquota.agent import Agent, Geometry, Settings
from kvquota.agent.contract import PageCommand
from kvquota.agent.local_rank import LocalRank
from kvquota.agent.rank_link import RankLinkError, RemoteRank
from kvquota.agent.rank_server import RankServer
from kvquota.native import Arena, FaultDriver, HostDriver, packet
from kvquota.native.status import Reason, Status

from tests.agent.fake_daemon import FakeDaemon
from tests.agent.rig import PAGE, TIMEOUT, WakingAdapter

PAGES = 16
GEOMETRY = Geometry(PAGE, PAGE, PAGES)
HELLO = {"kind": "hello", "version": 1, "unit": PAGE, "span": PAGE, "blocks": PAGES, "page_bytes": PAGE}
REPORT = {"kind": "report", "done": 3, "created": 9, "refused": 0, "dropped": 1, "quarantined_credits": 0}


class RankProcess:
    """Rank 1 in another process."""

    def __init__(self) -> None:
        self.address = f"kvquota-test/{uuid.uuid4()}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.rank_process", self.address, str(PAGES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, command: PageCommand) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command.seq, command.maps, command.unmaps]) + "\n")
        self.process.stdin.flush()

    def apply(self, command: PageCommand) -> None:
        self.send(command)
        assert self._line() == str(command.seq)

    def memory_bytes(self) -> int:
        total = 0
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "kvquota-granules" in os.readlink(fd):
                total += fd.stat().st_blocks * 512
        return total

    def close(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Pair:
    """An engine of two ranks: one in this process, one in another."""

    def __init__(self, other: RankProcess, socket_path: Path) -> None:
        self.other = other
        self.driver = HostDriver(fill=0xFF)
        self.arena = Arena(self.driver, [PAGE], PAGES)
        self.local = LocalRank(self.arena, self.driver)
        self.remote = RemoteRank("\0" + other.address, "rank 1", GEOMETRY, TIMEOUT)
        self.adapter = WakingAdapter()
        settings = Settings("test", socket=socket_path, reserve_bytes=0)
        self.agent = Agent(self.adapter, [self.local, self.remote], pages=PAGES, floor=0, settings=settings)

    def step(self, apply: Callable[[PageCommand], None] | None = None) -> PageCommand | None:
        self.agent.begin_step()
        command = self.agent.end_step()
        if command is not None:
            self.local.apply(command)
            (apply or self.other.apply)(command)
        return command

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT
        while not reached():
            assert time.monotonic() < end, self.agent.statistics()
            self.adapter.rung.wait(0.01)
            self.adapter.rung.clear()
            self.agent.poll()

    def fill(self, pages: int) -> None:
        self.adapter.wants = pages
        self.step()
        self.until(lambda: self.adapter.allowed == pages)
        grown = self.adapter.grow(pages)
        self.adapter.wants = 0
        self.step()
        self.adapter.become("evictable", *grown)

    def close(self) -> None:
        self.agent.close()
        self.arena.close()


@pytest.fixture
def other() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


@pytest.fixture
def pair(other: RankProcess, daemon: FakeDaemon, socket_path: Path) -> Iterator[Pair]:
    pair = Pair(other, socket_path)
    yield pair
    pair.close()


def test_both_ranks_grow_and_shrink_together(pair: Pair, daemon: FakeDaemon) -> None:
    connection = daemon.connection()
    pair.fill(6)
    assert pair.other.memory_bytes() == 6 * PAGE
    # Both ranks take their memory on this daemon's device.
    assert daemon.record.used_bytes == 2 * 6 * PAGE
    connection.limit(2 * 2 * PAGE, 1)
    assert pair.adapter.rung.wait(TIMEOUT)
    command = pair.step()
    assert command is not None
    assert len(command.unmaps) == 4
    connection.wait(lambda seen: seen.revision_applied == 1, pair.agent.poll)
    assert pair.other.memory_bytes() == 2 * PAGE
    assert connection.read().page_bytes == 2 * PAGE


def test_a_late_rank_delays_applied_and_nothing_else(pair: Pair, daemon: FakeDaemon) -> None:
    connection = daemon.connection()
    pair.fill(4)
    connection.limit(0, 1)
    assert pair.adapter.rung.wait(TIMEOUT)
    os.kill(pair.other.process.pid, signal.SIGSTOP)
    try:
        pair.step(pair.other.send)
        pair.until(lambda: pair.local.report().done == 2)
        assert connection.standing() == (Status.DEFERRED, Reason.WAITING_FOR_RANKS)
        observed = connection.read()
        assert (observed.revision_decided, observed.revision_applied) == (1, 0)
        assert observed.retiring_pages == observed.mapped_pages == 4
        assert not pair.agent.needs_step
    finally:
        os.kill(pair.other.process.pid, signal.SIGCONT)
    connection.wait(lambda seen: seen.revision_applied == 1, pair.agent.poll)
    assert connection.standing() == (Status.APPLIED, Reason.NONE)


def test_a_dead_rank_degrades_and_its_pages_stay(pair: Pair, daemon: FakeDaemon) -> None:
    connection = daemon.connection()
    pair.fill(4)
    connection.limit(0, 1)
    assert pair.adapter.rung.wait(TIMEOUT)
    pair.other.process.kill()
    pair.step(lambda _: None)
    observed = connection.wait(lambda seen: seen.reason == Reason.RANK_LOST, pair.agent.poll)
    assert (observed.status, observed.ranks, observed.ranks_lost) == (Status.DEGRADED, 2, 1)
    assert (observed.revision_applied, observed.retiring_pages) == (0, 4)
    assert pair.remote.lost is not None
    assert str(pair.other.process.pid) in pair.remote.lost
    # The engine thread never hangs on it.
    assert pair.agent.grow_now(1, timeout=0.001) == 0


def test_growth_for_a_running_request_waits_for_the_remote_rank_too(pair: Pair) -> None:
    pair.agent.begin_step()
    assert pair.agent.grow_now(2, timeout=TIMEOUT) == 2
    pair.adapter.grow(2)
    command = pair.agent.end_step()
    assert command is not None
    pair.local.apply(command)
    pair.other.apply(command)
    assert pair.other.memory_bytes() == 2 * PAGE


@pytest.mark.parametrize(
    "said",
    [
        b"\xff",
        b'{"kind":"report","done":-1}',
        b'{"kind":"report","done":1,"created":1,"refused":0,"dropped":0}',
        b'{"kind":"ask","asked":1,"dropped":0}',
        b'{"kind":"mended","page":3,"operation":"mem_unmap"}',
        b"y" * 5000,
    ],
)
def test_a_rank_that_talks_nonsense_is_lost_with_the_cause(said: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = f"\0kvquota-test/{uuid.uuid4()}"
        listener.bind(address)
        listener.listen()
        rank, peer = _greeted(listener, address, HELLO)
        with peer:
            peer.send(packet.encode(REPORT))
            peer.send(said)
            assert not rank.ready()
            assert rank.lost is not None
            assert rank.name in rank.lost
            assert rank.report().done == 3
        rank.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks": 17}, "expected Geometry"),
        ({"version": 2}, "version 2"),
        ({"kind": "report"}, "'report'"),
        ({"page_bytes": 0}, "page_bytes"),
    ],
)
def test_a_rank_that_does_not_fit_is_named(change: dict[str, object], said: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = f"\0kvquota-test/{uuid.uuid4()}"
        listener.bind(address)
        listener.listen()
        with pytest.raises(RankLinkError) as caught:
            _greeted(listener, address, {**HELLO, **change})
        assert said in str(caught.value)
        assert "rank 1" in str(caught.value)


def _greeted(
    listener: socket.socket, address: str, hello: dict[str, object]
) -> tuple[RemoteRank, socket.socket]:
    """A RemoteRank connected to the test itself, which said `hello`."""
    peers: list[socket.socket] = []

    def serve() -> None:
        peer, _ = listener.accept()
        packet.send(peer, packet.encode(hello))
        peers.append(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        rank = RemoteRank(address, "rank 1", GEOMETRY, TIMEOUT)
    except BaseException:
        thread.join(TIMEOUT)
        peers[0].close()
        raise
    thread.join(TIMEOUT)
    return rank, peers[0]


def test_a_rank_that_is_not_there_is_named_within_the_time_out() -> None:
    with pytest.raises(RankLinkError, match=r"rank 7.*nobody"):
        RemoteRank("\0kvquota-test/nobody", "rank 7", GEOMETRY, 0.05)


def test_a_leader_that_talks_nonsense_is_hung_up_on_and_the_next_is_served() -> None:
    address = f"\0kvquota-test/{uuid.uuid4()}"
    driver = HostDriver()
    arena = Arena(driver, [PAGE], PAGES)
    server = RankServer(arena, GEOMETRY, address, driver)
    for said in (b"\xff", b'{"kind":"ask","asked":1,"dropped":2}', b'{"kind":"record"}', b'{"kind":"stop"}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bad:
            bad.settimeout(TIMEOUT)
            bad.connect(address)
            bad.send(said)
            while bad.recv(4096):
                pass
    assert arena.report().created == 0
    rank = RemoteRank(address, "rank 0", GEOMETRY, TIMEOUT)
    rank.ask(3, 0)
    arena.wait_credits(3, TIMEOUT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.settimeout(TIMEOUT)
        second.connect(address)
        assert second.recv(4096) == b""
    rank.close()
    server.close()
    server.close()
    arena.close()
    with pytest.raises(RankLinkError):
        RemoteRank(address, "rank 0", GEOMETRY, 0.05)


def test_a_rank_with_more_faults_than_there_can_be_is_lost() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = f"\0kvquota-test/{uuid.uuid4()}"
        listener.bind(address)
        listener.listen()
        rank, peer = _greeted(listener, address, HELLO)
        with peer:
            for number in range(10_000):
                fault = {"seq": 1, "page": number, "operation": "mem_unmap", "code": 5, "name": "EIO"}
                with suppress(BrokenPipeError):
                    peer.send(packet.encode({"kind": "fault", **fault}))
                if not rank.ready():
                    break
            assert rank.lost is not None
            assert "one fault too many" in rank.lost
        rank.close()


def test_a_fault_is_told_before_the_report_that_covers_it_and_its_end_after() -> None:
    address = f"\0kvquota-test/{uuid.uuid4()}"
    driver = FaultDriver(HostDriver())
    arena = Arena(driver, [PAGE], PAGES)
    server = RankServer(arena, GEOMETRY, address)
    rank = RemoteRank(address, "rank 0", GEOMETRY, TIMEOUT)
    rank.ask(2, 0)
    _hear(rank, lambda: rank.report().created == 2)
    arena.apply(1, [0, 1], [])
    # The run, and each page three times; then again, after a while and after a longer one.
    driver.fail("mem_unmap", times=21)
    arena.apply(2, [], [0, 1])
    _hear(rank, lambda: rank.report().done == 2)
    assert {fault.page for fault in rank.report().faults} == {0, 1}
    assert {fault.operation for fault in rank.report().faults} == {"mem_unmap"}
    _hear(rank, lambda: not rank.report().faults)
    assert arena.report().unmapped == 2
    rank.close()
    server.close()
    arena.close()


def _hear(rank: RemoteRank, reached: Callable[[], bool]) -> None:
    while not reached():
        assert select.select([rank.fileno()], [], [], TIMEOUT)[0]
        assert rank.ready()
