"""One suite for every adapter: what an operator and an engine's users may rely on."""

from pathlib import Path

import pytest
from kvquota.native.status import Reason, Status

from tests.agent.fake_daemon import FakeDaemon
from tests.conformance.bench import Bench


def test_an_idle_engine_gives_memory_back_and_what_fits_still_hits(bench: Bench) -> None:
    prompts = bench.fill(4)
    before = bench.run([prompts[-1]], 8)
    revision = bench.limit(2)
    seen = bench.applied(revision)
    assert seen.mapped_pages <= 2
    assert bench.engine.memory_bytes() <= 2 * bench.page_bytes
    assert seen.evictable_pages > 0
    request = bench.engine.submit(prompts[-1], 8)
    assert bench.finish([request]) == before
    assert bench.engine.cached(request) > 0


def test_growth_stays_within_the_limit_and_no_request_fails(bench: Bench) -> None:
    prompts = [bench.prompt(bench.case.tokens_per_page // 2) for _ in range(12)]
    free = bench.run(prompts, 4)
    bench.engine.reset_prefix_cache()
    revision = bench.limit(1 + bench.case.floor)
    bench.applied(revision)
    assert bench.run(prompts, 4) == free
    seen = bench.connection.read()
    assert seen.mapped_pages <= 1 + bench.case.floor
    assert bench.engine.memory_bytes() <= (1 + bench.case.floor) * bench.page_bytes


def test_a_limit_revokes_no_running_request_and_converges_when_it_ends(bench: Bench) -> None:
    long = bench.prompt(bench.case.tokens_per_page * 5 // 4)
    short = [bench.prompt(bench.case.tokens_per_page // 2) for _ in range(4)]
    expected = bench.run([long], 128) + bench.run(short, 8)
    bench.engine.reset_prefix_cache()
    running = bench.engine.submit(long, 128)
    bench.wait(lambda seen: seen.pinned_pages >= 2)
    revision = bench.limit(bench.case.floor)
    bench.wait(lambda seen: seen.revision_decided == revision)
    waiting = [bench.engine.submit(prompt, 8) for prompt in short]
    # What it still needs lies beside what it has.
    assert bench.finish([running]) == expected[:1]
    bench.wait(lambda seen: seen.mapped_pages <= bench.case.floor)
    assert bench.engine.memory_bytes() <= bench.case.floor * bench.page_bytes
    bench.limit(None)
    assert bench.finish(waiting) == expected[1:]


def test_limit_zero_admits_nothing_and_restoring_it_serves_what_waited(bench: Bench) -> None:
    # The short one would fit into free blocks of a floor page.
    short, long = bench.prompt(2), bench.prompt(bench.case.longest // 2)
    for prompt in (short, long, short):
        expected = bench.run([prompt], 4)
        revision = bench.limit(0)
        seen = bench.wait(
            lambda seen, revision=revision: (
                seen.revision_decided == revision  # type: ignore[misc]
                and seen.mapped_pages <= bench.case.floor
            )
        )
        assert seen.limit_bytes == 0
        request = bench.engine.submit(prompt, 4)
        bench.wait(lambda seen: seen.requests_waiting == 1)
        assert bench.engine.output(request) is None
        bench.limit(None)
        assert bench.finish([request]) == expected


def test_limit_zero_settles(bench: Bench) -> None:
    bench.fill(2)
    revision = bench.limit(0)
    bench.wait(lambda seen: seen.revision_decided == revision and seen.retiring_pages == 0)
    if bench.case.floor:
        assert bench.standing() == (Status.DEFERRED, Reason.FLOOR)
        assert bench.connection.read().revision_applied == 0
    else:
        assert bench.standing() == (Status.APPLIED, Reason.NONE)
    assert bench.engine.memory_bytes() == bench.case.floor * bench.page_bytes


def test_a_cache_reset_neither_forgets_a_limit_nor_revives_one(bench: Bench) -> None:
    bench.fill(2)
    revision = bench.limit(bench.case.floor)
    bench.applied(revision)
    bench.engine.reset_prefix_cache()
    request = bench.engine.submit(bench.prompt(bench.case.longest // 2), 2)
    bench.wait(lambda seen: seen.requests_waiting == 1)
    assert bench.engine.memory_bytes() <= bench.case.floor * bench.page_bytes
    revision = bench.limit(bench.case.floor + 2)
    bench.finish([request])
    bench.engine.reset_prefix_cache()
    bench.fill(1)
    assert bench.applied(revision).mapped_pages <= bench.case.floor + 2


def test_asleep_an_engine_holds_nothing_and_awake_it_is_as_new(bench: Bench) -> None:
    prompt = bench.prompt(bench.case.longest // 2)
    expected = bench.run([prompt], 8)
    bench.engine.sleep()
    seen = bench.wait(lambda seen: seen.mapped_pages == 0)
    assert bench.engine.memory_bytes() == 0
    assert (seen.target_pages, bench.standing()) == (0, (Status.APPLIED, Reason.NONE))
    bench.applied(bench.limit(0))
    assert bench.standing() == (Status.APPLIED, Reason.NONE)

    request = bench.engine.submit(prompt, 8)
    bench.engine.wake_up()
    seen = bench.wait(lambda seen: seen.pinned_pages == bench.case.floor and seen.requests_blocked == 1)
    assert bench.engine.memory_bytes() == bench.case.floor * bench.page_bytes
    held = (Status.DEFERRED, Reason.FLOOR) if bench.case.floor else (Status.APPLIED, Reason.NONE)
    assert bench.standing() == held
    assert bench.engine.output(request) is None
    bench.limit(None)
    assert bench.finish([request]) == expected
    assert bench.engine.cached(request) == 0


@pytest.mark.parametrize("pages", [0.5, 10_000.0, None])
def test_odd_limits_are_clamped_and_reported_as_asked(bench: Bench, pages: float | None) -> None:
    revision = bench.limit(pages)
    seen = bench.wait(lambda seen: seen.revision_decided == revision)
    expected = {0.5: bench.case.floor}.get(pages or 0.0, seen.capacity_pages)
    assert seen.target_pages == expected
    assert seen.limit_bytes == (None if pages is None else int(pages * bench.page_bytes))


def test_a_restored_limit_costs_nothing_until_it_is_used(bench: Bench) -> None:
    bench.fill(3)
    bench.applied(bench.limit(1 + bench.case.floor))
    before = bench.engine.memory_bytes()
    bench.applied(bench.limit(None))
    assert bench.engine.memory_bytes() == before
    bench.fill(3)
    assert bench.engine.memory_bytes() > before


def test_requests_do_not_notice_a_daemon_that_goes_and_comes_back(bench: Bench, socket_path: Path) -> None:
    prompts = [bench.prompt(bench.case.tokens_per_page // 2) for _ in range(4)]
    expected = bench.run(prompts, 16)
    bench.applied(bench.limit(3))
    requests = [bench.engine.submit(prompt, 16) for prompt in prompts]
    limit_bytes = 3 * bench.page_bytes
    bench.daemon.close()
    assert bench.finish(requests) == expected
    assert bench.engine.memory_bytes() <= limit_bytes
    with FakeDaemon(socket_path) as again:
        bench.connection = again.connection()
        assert bench.connection.hello["revision"] == 1
        assert bench.connection.hello["limit_bytes"] == limit_bytes
        bench.engine.close()


def test_no_engine_leaves_memory_or_a_connection_behind(bench: Bench) -> None:
    bench.fill(1)
    bench.engine.close()
    bench.connection.sock.settimeout(10)
    while bench.connection.sock.recv(4096):
        pass
    assert bench.engine.memory_bytes() == 0
