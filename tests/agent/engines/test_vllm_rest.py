"""A starved loop of vLLM's own engine core: when it sleeps, and what wakes it."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_core import PAGE_BLOCKS, TIMEOUT, Core
from tests.support.vllm_pages import BLOCK_TOKENS, model, prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("vllm_imported"),
    # vLLM's own use of xgrammar.
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
]

PAGES = 8
SMALL = 8
BIG = PAGE_BLOCKS * BLOCK_TOKENS


@pytest.fixture
def core(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    """Its loop runs under a limit of one page, and sleeps for as long as it is told nothing."""
    monkeypatch.setattr("kvquota.agent.engines.vllm.scheduler._LONGEST_REST_S", 1000.0)
    running = Core(model(short_dir), monkeypatch, pages=PAGES)
    running.limit(1)
    running.start()
    yield running
    running.close()


def send(core: Core, name: str, tokens: int, **options: Any) -> Any:
    request = core.request(name, prompt(len(name), tokens), **options)
    core.send("ADD", (request, 0))
    return request


def starve(core: Core) -> Any:
    """A request that waits for a second page, and a loop that sleeps."""
    request = send(core, "big", BIG)
    core.until("it is refused", lambda: core.scheduler._adapter.not_admitted is request)
    core.until_asleep()
    return request


def structured(core: Core, name: str) -> tuple[Any, "Future[Any]", Any]:
    """A request whose grammar is ready once the future has what comes with it. The word w7 is token 7."""
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(regex="(w7)+")
    params._backend = "xgrammar"
    request = core.request(name, prompt(len(name), SMALL), structured_outputs=params)
    core.engine.structured_output_manager.grammar_init(request)
    compiling = request.structured_output_request._grammar
    held: Future[Any] = Future()
    request.structured_output_request.grammar = held
    core.send("ADD", (request, 0))
    return request, held, compiling.result(TIMEOUT)


def test_a_starved_loop_makes_one_step_for_each_news(core: Core) -> None:
    starve(core)
    before = core.until_asleep()
    for _ in range(5):
        core.send("WAKEUP", None)
        core.until("it has seen it", lambda: not core.engine.input_queue.queue)
        core.until_asleep()
    assert core.steps - before <= 5


def test_a_limit_wakes_it(core: Core) -> None:
    starve(core)
    core.limit(3)
    core.until("the request is served", lambda: not core.scheduler.requests)


def test_a_credit_wakes_it(core: Core) -> None:
    core.rank.held = True
    starve(core)
    core.limit(3)
    core.until("credits are asked for", lambda: core.rank.pending > 0)
    core.until_asleep()
    core.rank.serve()
    core.until("the request is served", lambda: not core.scheduler.requests)


def test_a_request_that_fits_is_served_once_the_one_before_it_is_aborted(core: Core) -> None:
    starve(core)
    before = core.until_asleep()
    send(core, "small", SMALL)
    core.until("it is queued", lambda: "small" in core.scheduler.requests)
    core.until_asleep()
    assert core.steps - before <= 2
    core.send("ABORT", ["big"])
    core.until("both are gone", lambda: not core.scheduler.requests)


def test_pause_and_resume_wake_it(core: Core) -> None:
    starve(core)
    core.send("UTILITY", (0, 1, "pause_scheduler", ("keep", False)))
    core.until("it is paused", core.engine.is_scheduler_paused)
    core.until_asleep()
    core.limit(3)
    core.send("UTILITY", (0, 2, "resume_scheduler", ()))
    core.until("the request is served", lambda: not core.scheduler.requests)


def test_a_grammar_is_taken_up_when_it_is_ready_though_the_next_request_lacks_memory(core: Core) -> None:
    request, held, compiled = structured(core, "grammar")
    big = send(core, "big", BIG)
    core.until("memory is refused", lambda: core.scheduler._adapter.not_admitted is big)
    # Nobody tells the loop: it looks by itself.
    held.set_result(compiled)
    core.until("it is served", lambda: "grammar" not in core.scheduler.requests)
    assert list(request.output_token_ids) == [7]
    core.until_asleep()
    core.limit(3)
    core.until("so is the other", lambda: not core.scheduler.requests)


def test_a_grammar_behind_a_request_that_lacks_memory_keeps_no_loop_awake(core: Core) -> None:
    from kvquota.agent.engines.vllm import versions

    if versions.known() == "0.30":
        pytest.skip("vLLM 0.30 looks at requests without a grammar first, wherever they are in the queue")
    starve(core)
    request, held, compiled = structured(core, "grammar")
    core.until("it is queued", lambda: "grammar" in core.scheduler.requests)
    before = core.until_asleep()
    held.set_result(compiled)
    core.send("WAKEUP", None)
    core.until_asleep()
    assert core.steps - before <= 1
    core.send("ABORT", ["big"])
    core.until("it is served", lambda: not core.scheduler.requests)
    assert list(request.output_token_ids) == [7]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_in_a_starved_engine(core: Core) -> None:
    _, held, _ = structured(core, "grammar")
    big = send(core, "big", BIG)
    core.until("memory is refused", lambda: core.scheduler._adapter.not_admitted is big)
    held.set_exception(ValueError("no such grammar"))
    core.until("it has failed", lambda: list(core.scheduler.requests) == ["big"])
    core.until_asleep()
