"""Limits on a real vLLM, idle and busy, through a real daemon. One engine serves the whole module."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import DaemonProcess, until
from tests.support.vllm import Engine, Reply
from tests.support.vllm_pages import (
    HIT_TOKENS,
    OUTPUT,
    PAGE_BYTES,
    PAGE_TOKENS,
    model,
    prompt,
    prompts,
    start,
)

pytestmark = pytest.mark.vllm

PAGES = 32
BLOCKS = PAGES * 16
NAME = "vllm/limits"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    """What vLLM answers without kvquota, by prompt number."""
    stock = start(checkpoint, {}, BLOCKS)
    try:
        return {n: reply.tokens for n, reply in enumerate(stock.generate(prompts(range(40)), OUTPUT))}
    finally:
        stock.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path_factory.mktemp("d"))
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def running(checkpoint: Path, daemon: DaemonProcess) -> Iterator[Engine]:
    environment = {
        **daemon.environment(NAME),
        "KVQUOTA_RESERVE_BYTES": str(8 * PAGE_BYTES),
        "KVQUOTA_HOST_FILL": "255",
    }
    elastic = start(checkpoint, environment, BLOCKS)
    yield elastic
    elastic.close()


@pytest.fixture
def engine(running: Engine, daemon: DaemonProcess) -> Engine:
    """The engine without a limit, and with an empty cache."""
    limit(daemon, None)
    assert running.call("reset_prefix_cache")
    return running


def limit(daemon: DaemonProcess, pages: int | None) -> pb.Instance:
    """Set a limit and wait until it is settled."""
    limit_bytes = None if pages is None else pages * PAGE_BYTES
    response = daemon.set(NAME, limit_bytes, wait=True, wait_timeout_ms=15_000)
    assert not response.timed_out, response
    return response.instance


def fill(engine: Engine, expected: dict[int, list[int]], numbers: range) -> None:
    for number, reply in zip(numbers, engine.generate(prompts(numbers), OUTPUT), strict=True):
        assert reply.tokens == expected[number]


def test_an_idle_engine_gives_its_cache_back_and_keeps_what_fits(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    fill(engine, expected, range(22))
    fill(engine, expected, range(22, 30))
    assert engine.kv_bytes() > 26 * PAGE_BYTES

    instance = limit(daemon, 10)

    assert (instance.status, instance.reason) == (pb.STATUS_APPLIED, pb.REASON_NONE)
    assert instance.mapped_bytes <= 10 * PAGE_BYTES
    assert engine.kv_bytes() <= 10 * PAGE_BYTES
    # The eight newest fit in ten pages, whatever they share pages with.
    newest = engine.generate(prompts(range(22, 30)), OUTPUT)
    assert newest == [Reply(expected[number], cached=HIT_TOKENS) for number in range(22, 30)]
    oldest = engine.generate(prompts(range(22)), OUTPUT)
    assert [reply.tokens for reply in oldest] == [expected[number] for number in range(22)]
    assert sum(reply.cached for reply in oldest) <= 3 * PAGE_TOKENS
    assert engine.kv_bytes() <= 10 * PAGE_BYTES


def test_a_restored_limit_lets_the_cache_grow_again(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    for _ in range(3):
        limit(daemon, 2)
        assert engine.kv_bytes() <= 2 * PAGE_BYTES
        limit(daemon, None)
        fill(engine, expected, range(10))
        assert engine.kv_bytes() > 8 * PAGE_BYTES


def test_a_stream_of_requests_stays_within_a_falling_limit(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    fill(engine, expected, range(24))
    replies: dict[int, list[int]] = {}
    served: list[int] = []
    stop = threading.Event()

    def stream(first: int) -> None:
        number = first
        while not stop.is_set():
            replies[number] = engine.generate([prompt(number)], OUTPUT)[0].tokens
            served.append(number)
            number = first + (number + 1 - first) % 10

    streams = [threading.Thread(target=stream, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in streams:
        thread.start()
    try:
        for pages in (20, 12, 6):
            instance = limit(daemon, pages)
            assert instance.status == pb.STATUS_APPLIED
            assert engine.kv_bytes() <= pages * PAGE_BYTES
            served.clear()
            until("more requests are served", lambda: len(served) > 5)
            assert engine.kv_bytes() <= pages * PAGE_BYTES
    finally:
        stop.set()
        for thread in streams:
            thread.join(60)
    assert replies == {number: expected[number] for number in replies}


def test_limit_0_holds_requests_until_it_is_raised(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    instance = limit(daemon, 0)
    assert (instance.status, instance.reason) == (pb.STATUS_DEFERRED, pb.REASON_FLOOR)
    assert instance.settled
    assert instance.limit_bytes == 0
    assert engine.kv_bytes() <= PAGE_BYTES

    held = [engine.request(prompt(number), OUTPUT) for number in range(4)]
    short = engine.request(prompt(5, tokens=40), 2)
    until("the requests are held", lambda: daemon.get(NAME).requests_blocked == 5)
    assert engine.kv_bytes() <= PAGE_BYTES
    assert not any(future.done() for future in (*held, short))

    limit(daemon, 6)
    assert [future.result(60).tokens for future in held] == [expected[number] for number in range(4)]
    assert short.result(60).tokens


def test_a_held_request_costs_no_cpu(engine: Engine, daemon: DaemonProcess) -> None:
    limit(daemon, 0)
    held = engine.request(prompt(1), OUTPUT)
    until("the request is held", lambda: daemon.get(NAME).requests_blocked == 1)
    before = daemon.get(NAME)
    for _ in range(40):
        daemon.get(NAME)
    after = daemon.get(NAME)
    assert after.allocations_refused_total - before.allocations_refused_total <= 3
    limit(daemon, None)
    held.result(60)


def test_the_prefix_cache_can_be_reset_under_a_limit(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    fill(engine, expected, range(12))
    limit(daemon, 3)
    assert engine.call("reset_prefix_cache")
    assert engine.kv_bytes() <= 3 * PAGE_BYTES
    assert engine.generate([prompt(11)], OUTPUT) == [Reply(expected[11], cached=0)]
    assert engine.kv_bytes() <= 3 * PAGE_BYTES


def test_running_requests_keep_their_pages_until_they_end(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    alone = [reply.tokens for reply in engine.generate(prompts(range(4)), 60)]
    assert engine.call("reset_prefix_cache")
    futures = [engine.request(prompt(number), 60) for number in range(4)]
    until("they run", lambda: daemon.get(NAME).pinned_bytes >= 4 * PAGE_BYTES)
    # Two pages: one that is preempted, because it outgrows the pages that it sits in, fits in those.
    daemon.set(NAME, 2 * PAGE_BYTES)
    until("its pages drain", lambda: daemon.get(NAME).draining_bytes >= 2 * PAGE_BYTES)
    deferred = daemon.get(NAME)
    assert (deferred.status, deferred.reason) == (pb.STATUS_DEFERRED, pb.REASON_PINNED_BY_RUNNING_REQUESTS)
    assert [future.result(60).tokens for future in futures] == alone
    until("it is applied", lambda: daemon.get(NAME).status == pb.STATUS_APPLIED)
    assert engine.kv_bytes() <= 2 * PAGE_BYTES


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_an_engine_pauses_and_resumes_while_requests_are_held(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]], mode: str
) -> None:
    fill(engine, expected, range(8))
    limit(daemon, 0)
    held = [engine.request(prompt(number), OUTPUT) for number in range(4)]
    until("the requests are held", lambda: daemon.get(NAME).requests_blocked == 4)

    engine.call("pause_generation", mode=mode, clear_cache=False)
    # A paused engine still follows its limit.
    assert limit(daemon, 6).status == pb.STATUS_APPLIED
    assert engine.call("reset_prefix_cache")
    engine.call("resume_generation")

    tokens = [future.result(60).tokens for future in held]
    assert tokens == ([expected[number] for number in range(4)] if mode == "keep" else [[]] * 4)
    fill(engine, expected, range(4, 8))
    assert engine.kv_bytes() <= 6 * PAGE_BYTES


def test_a_paused_engine_gives_memory_back(
    engine: Engine, daemon: DaemonProcess, expected: dict[int, list[int]]
) -> None:
    fill(engine, expected, range(12))
    engine.call("pause_generation", mode="wait", clear_cache=False)
    assert limit(daemon, 4).status == pb.STATUS_APPLIED
    assert engine.kv_bytes() <= 4 * PAGE_BYTES
    engine.call("resume_generation")
    fill(engine, expected, range(12))
