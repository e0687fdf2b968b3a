"""Requests of vLLM's own engine core that end early or are preempted under a limit, and their memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvquota.native.status import Reason, Status

from tests.support.vllm_core import PAGE_BLOCKS, Core
from tests.support.vllm_pages import BLOCK_TOKENS, model, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]

PAGES = 8
PAGE_TOKENS = PAGE_BLOCKS * BLOCK_TOKENS


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(short_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Core]:
    running = Core(model(short_dir), monkeypatch, pages=PAGES, asynchronous=request.param)
    yield running
    running.close()


def rest(core: Core, pages: int) -> None:
    """Go on until nothing is left to do: only the null block is used, and `pages` of memory are held."""

    def idle() -> bool:
        return not core.engine.has_work() and core.connection.read().mapped_pages == pages

    core.connection.wait(lambda _: idle(), core.step)
    core.queue.check()
    assert core.queue.num_used_blocks == 1
    assert core.connection.standing() == (Status.APPLIED, Reason.NONE)


def run(core: Core, name: str, tokens: int, output: int, until: int) -> Any:
    """A request that has generated `until` of `output` tokens."""
    request = core.add(name, prompt(len(name), tokens), max_tokens=output)
    core.step_until(lambda: request.num_output_tokens >= until)
    return request


def test_held_requests_that_are_aborted_leave_an_engine_that_wants_nothing(core: Core) -> None:
    core.limit(1)
    core.add("a", prompt(1, PAGE_TOKENS))
    core.add("b", prompt(2, PAGE_TOKENS))
    core.step_until(lambda: core.connection.read().requests_blocked == 2)
    core.engine.abort_requests(["a"])
    core.step_until(lambda: core.connection.read().requests_blocked == 1)
    core.engine.abort_requests(["b"])
    rest(core, 1)
    core.limit(None)
    rest(core, 1)
    assert core.connection.read().requests_blocked == 0


@pytest.mark.parametrize("during_a_step", [False, True])
def test_a_running_request_that_is_aborted_gives_up_its_draining_pages(
    core: Core, during_a_step: bool
) -> None:
    run(core, "r", PAGE_TOKENS, output=200, until=3)
    core.limit(1)
    core.step()
    core.step()
    assert core.connection.read().draining_pages == 1
    assert core.connection.standing() == (Status.DEFERRED, Reason.PINNED_BY_RUNNING_REQUESTS)
    if during_a_step:
        core.engine.aborts_queue.put_nowait(["r"])
    else:
        # Where steps overlap, one of this request is in flight.
        core.engine.abort_requests(["r"])
    rest(core, 1)


def test_a_falling_limit_preempts_no_request_that_fits_where_it_is(core: Core) -> None:
    # Each crosses into new blocks while the limit falls, and all of them stay within their two pages.
    requests = [run(core, name, 3 * BLOCK_TOKENS, output=3 * BLOCK_TOKENS, until=3) for name in ("a", "bb")]
    requests.append(run(core, "ccc", PAGE_TOKENS - 4 * BLOCK_TOKENS, output=BLOCK_TOKENS * 2, until=3))
    for pages in (4, 2, 1, 0):
        core.limit(pages)
        for _ in range(8):
            core.step()
    core.step_until(lambda: not core.scheduler.requests)
    assert [request.num_preemptions for request in requests] == [0, 0, 0]
    assert [request.num_output_tokens for request in requests] == [96, 96, 64]
    core.limit(1)
    rest(core, 1)


def test_a_request_that_outgrows_the_limit_waits_until_it_fits_and_ends_with_its_tokens(core: Core) -> None:
    request = run(core, "r", PAGE_TOKENS - 2 * BLOCK_TOKENS, output=4 * BLOCK_TOKENS, until=3)
    core.limit(1)
    core.step_until(lambda: request.num_preemptions > 0)
    core.connection.wait(lambda observed: observed.requests_blocked == 1, core.step)
    assert core.connection.read().mapped_pages == 1
    core.limit(2)
    core.step_until(lambda: not core.scheduler.requests)
    assert list(request.output_token_ids) == [7] * (4 * BLOCK_TOKENS)
    core.limit(1)
    rest(core, 1)
