"""A real vLLM that sleeps and wakes: asleep it holds no KV memory, under any limit, and it wakes as new."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kvquota.native import HostDriver, OutOfMemoryError
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import DaemonProcess, FakeAgent, until
from tests.support.vllm import Engine, Reply
from tests.support.vllm_pages import HIT_TOKENS, OUTPUT, PAGE_BYTES, model, prompt, prompts, start

pytestmark = pytest.mark.vllm

PAGES = 12
BLOCKS = PAGES * 16
NAME = "vllm/sleep"
LONG = 40
CAPACITY = 16 * PAGE_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What vLLM answers to the first prompts without kvquota: to three of them at length."""
    stock = start(checkpoint, {}, BLOCKS)
    try:
        lengths = [(range(3), LONG), (range(3, 8), OUTPUT)]
        return [reply.tokens for part, tokens in lengths for reply in stock.generate(prompts(part), tokens)]
    finally:
        stock.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path_factory.mktemp("d"), str(CAPACITY))
    running.start()
    yield running
    assert running.stop() == 0


def join(checkpoint: Path, daemon: DaemonProcess, name: str = NAME, **options: object) -> Engine:
    environment = {
        **daemon.environment(name),
        "KVQUOTA_RESERVE_BYTES": str(4 * PAGE_BYTES),
        "KVQUOTA_HOST_FILL": "255",
    }
    return start(checkpoint, environment, BLOCKS, **options)


@pytest.fixture(scope="module")
def running(checkpoint: Path, daemon: DaemonProcess) -> Iterator[Engine]:
    elastic = join(checkpoint, daemon)
    yield elastic
    elastic.call("sleep")
    assert elastic.close(), "it ends while it sleeps"


@pytest.fixture
def engine(running: Engine, daemon: DaemonProcess) -> Engine:
    """The engine awake, and without a limit."""
    if running.call("is_sleeping"):
        running.call("wake_up")
    daemon.set(NAME, None, wait=True)
    return running


def gone(engine: Engine, daemon: DaemonProcess, name: str = NAME) -> None:
    """Wait until nothing is mapped."""
    until("all memory is gone", lambda: daemon.get(name).mapped_bytes == 0)
    assert engine.kv_bytes() == 0
    assert engine.check_blocks() == []
    instance = daemon.get(name)
    assert (instance.status, instance.reason) == (pb.STATUS_APPLIED, pb.REASON_NONE)
    assert instance.settled


def back(daemon: DaemonProcess) -> None:
    """Wait until the null block's page is back."""
    until("the floor is back", lambda: daemon.get(NAME).pinned_bytes == PAGE_BYTES)


def serves_as_new(engine: Engine, expected: list[list[int]], numbers: range = range(8)) -> None:
    """The same tokens as unmodified vLLM, with nothing in the cache; and what is cached now hits."""
    replies = engine.generate(prompts(numbers), OUTPUT)
    assert replies == [Reply(expected[number][:OUTPUT], cached=0) for number in numbers]
    last = numbers[-1]
    assert engine.generate([prompt(last)], OUTPUT) == [Reply(expected[last][:OUTPUT], cached=HIT_TOKENS)]
    assert engine.check_blocks() == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_holds_no_memory_and_wakes_as_new(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]], level: int
) -> None:
    engine.generate(prompts(range(8)), OUTPUT)
    assert engine.kv_bytes() > 6 * PAGE_BYTES
    engine.call("sleep", level=level)
    gone(engine, daemon)
    assert engine.check_books() == []
    assert engine.call("is_sleeping")
    engine.call("wake_up")
    assert not engine.call("is_sleeping")
    back(daemon)
    serves_as_new(engine, expected)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_while_requests_run(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]], mode: str
) -> None:
    # In empty pages, less than all three do not pin three.
    engine.call("sleep")
    gone(engine, daemon)
    engine.call("wake_up")
    requests = [engine.request(prompt(number), LONG) for number in range(3)]
    until("they run", lambda: daemon.get(NAME).pinned_bytes >= 3 * PAGE_BYTES)
    engine.call("sleep", mode=mode)
    gone(engine, daemon)
    if mode == "keep":
        assert not any(request.done() for request in requests)
        engine.call("wake_up")
    tokens = [request.result(60).tokens for request in requests]
    if mode == "abort":
        assert all(len(some) < LONG for some in tokens)
    else:
        assert tokens == expected[:3]
    if mode != "keep":
        engine.call("wake_up")
    serves_as_new(engine, expected, range(3, 8))


def test_a_request_to_a_sleeping_engine_is_served_once_it_wakes(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    engine.call("sleep")
    # Resumed too early, it has no memory to serve anything: that is no error.
    engine.call("resume_generation")
    request = engine.request(prompt(0), OUTPUT)
    until("it waits for memory", lambda: daemon.get(NAME).requests_blocked == 1)
    gone(engine, daemon)
    engine.call("wake_up")
    assert request.result(60).tokens == expected[0][:OUTPUT]


def test_the_kv_cache_comes_back_when_its_own_tag_is_woken(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    engine.generate(prompts(range(4)), OUTPUT)
    engine.call("sleep", level=2)
    engine.call("wake_up", ["weights"])
    assert engine.call("is_sleeping")
    gone(engine, daemon)
    # As after an update of the weights.
    assert engine.call("reset_prefix_cache")
    engine.call("wake_up", ["kv_cache"])
    assert not engine.call("is_sleeping")
    back(daemon)
    serves_as_new(engine, expected)


def test_limits_change_while_an_engine_sleeps(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    engine.generate(prompts(range(4)), OUTPUT)
    engine.call("sleep")
    gone(engine, daemon)
    for pages in (4, 0, None, 0):
        limit_bytes = None if pages is None else pages * PAGE_BYTES
        instance = daemon.set(NAME, limit_bytes, wait=True).instance
        assert (instance.status, instance.mapped_bytes) == (pb.STATUS_APPLIED, 0)
    assert engine.kv_bytes() == 0
    engine.call("wake_up")
    # Awake it has its floor again, which limit 0 does not allow.
    until("the floor is back", lambda: daemon.get(NAME).reason == pb.REASON_FLOOR)
    instance = daemon.get(NAME)
    assert (instance.status, instance.settled) == (pb.STATUS_DEFERRED, True)
    assert engine.kv_bytes() == PAGE_BYTES
    request = engine.request(prompt(0), OUTPUT)
    until("the request is held", lambda: daemon.get(NAME).requests_blocked == 1)
    # Asleep under limit 0, and awake again: it is held as before.
    engine.call("sleep", mode="keep")
    gone(engine, daemon)
    engine.call("wake_up")
    until("the request is held", lambda: daemon.get(NAME).reason == pb.REASON_FLOOR)
    assert not request.done()
    daemon.set(NAME, 3 * PAGE_BYTES)
    assert request.result(60).tokens == expected[0][:OUTPUT]
    assert engine.kv_bytes() <= 3 * PAGE_BYTES


def test_sleep_while_a_limit_is_in_flight(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    for number in range(3):
        engine.request(prompt(number), LONG)
    until("they run", lambda: daemon.get(NAME).pinned_bytes >= 3 * PAGE_BYTES)
    daemon.set(NAME, 2 * PAGE_BYTES)
    engine.call("sleep")
    gone(engine, daemon)
    engine.call("wake_up")
    back(daemon)
    serves_as_new(engine, expected)
    assert engine.kv_bytes() <= 2 * PAGE_BYTES


def test_a_daemon_that_restarts_finds_a_sleeping_engine_asleep(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    engine.generate(prompts(range(4)), OUTPUT)
    daemon.set(NAME, 6 * PAGE_BYTES, wait=True)
    engine.call("sleep")
    daemon.kill()
    daemon.start()
    until("the engine is there", lambda: daemon.get(NAME).connected)
    gone(engine, daemon)
    assert daemon.set(NAME, 3 * PAGE_BYTES, wait=True).instance.status == pb.STATUS_APPLIED
    engine.call("wake_up")
    serves_as_new(engine, expected)
    assert engine.kv_bytes() <= 3 * PAGE_BYTES


def test_an_engine_that_finds_no_memory_on_waking_lives_and_serves_when_there_is_some(
    engine: Engine, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    engine.call("sleep")
    gone(engine, daemon)
    other = HostDriver()
    taken = []
    with FakeAgent(daemon.agent_socket) as agent:
        agent.hello("another")
        other.attach(agent.fds[2])
        with suppress(OutOfMemoryError):
            while True:
                taken.append(other.mem_create(PAGE_BYTES))
        engine.call("wake_up")
        request = engine.request(prompt(0), OUTPUT)
        until("it waits for memory", lambda: daemon.get(NAME).requests_blocked == 1)
        assert engine.kv_bytes() == 0
        assert not request.done()
        for handle in taken:
            other.mem_release(handle)
        assert request.result(60).tokens == expected[0][:OUTPUT]


def test_with_asynchronous_scheduling_and_sigterm_while_asleep(
    checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    name = f"{NAME}/async"
    engine = join(checkpoint, daemon, name, async_scheduling=True)
    try:
        requests = [engine.request(prompt(number), LONG) for number in range(3)]
        until("they run", lambda: daemon.get(name).pinned_bytes >= 3 * PAGE_BYTES)
        engine.call("sleep", mode="keep")
        gone(engine, daemon, name)
        engine.call("wake_up")
        assert [request.result(60).tokens for request in requests] == expected[:3]
        engine.call("sleep")
        gone(engine, daemon, name)
        os.killpg(engine.pid, signal.SIGTERM)
        until("it has ended", lambda: engine.pids() == [])
        until("the daemon sees it", lambda: not daemon.get(name).connected)
    finally:
        engine.close()
