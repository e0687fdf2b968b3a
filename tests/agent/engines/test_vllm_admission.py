"""Admissions of vLLM's own engine core while its pool must grow: what waits, what is evicted, and when."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_core import PAGE_BLOCKS, Core
from tests.support.vllm_pages import BLOCK_TOKENS, model, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_imported")]

PAGES = 8
# With the null block in page 0, such a request fills a page; its blocks are all cached afterwards.
PROMPT = (PAGE_BLOCKS - 1) * BLOCK_TOKENS


@pytest.fixture
def core(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    running = Core(model(short_dir), monkeypatch, pages=PAGES)
    yield running
    running.close()


def serve(core: Core, *numbers: int) -> None:
    """Have requests served while nothing is held: they leave their blocks in the cache."""
    core.rank.held = False
    for number in numbers:
        core.add(f"r{number}", prompt(number, PROMPT))
    # To the end: an idle engine gives back the credits that it holds beyond its reserve, of 0 here.
    core.step_until(lambda: not core.scheduler.has_requests())
    core.rank.held = True


def test_an_admission_waits_for_the_credits_that_are_coming_and_evicts_nothing(core: Core) -> None:
    serve(core, 1)
    cached = core.cached_blocks()
    assert cached == PAGE_BLOCKS - 1
    core.add("a", prompt(2, PROMPT))
    for _ in range(3):
        core.step()
        assert not core.scheduler.running
    assert core.cached_blocks() == cached
    core.rank.serve()
    core.step_until(lambda: not core.scheduler.requests)
    assert core.cached_blocks() == 2 * cached


def test_a_burst_asks_for_all_its_credits_at_once_and_not_for_what_it_hits(core: Core) -> None:
    serve(core, 1)
    before = core.rank.asked - core.rank.drop_wanted
    for number in range(1, 5):
        core.add(f"b{number}", prompt(number, PROMPT))
    core.step()
    # Three prompts of 15 blocks, one for what the hit computes anew and one for the token that is next.
    assert core.rank.asked - core.rank.drop_wanted == before + 3
    core.rank.serve()
    core.step_until(lambda: not core.scheduler.requests)
    assert core.cached_blocks() == 4 * (PAGE_BLOCKS - 1)


@pytest.mark.parametrize("why", ["refused", "lost", "limit"])
def test_an_admission_evicts_once_nothing_is_coming_any_more(core: Core, why: str) -> None:
    serve(core, 1)
    core.add("a", prompt(2, PROMPT))
    core.step()
    assert not core.scheduler.running
    if why == "refused":
        core.rank.refuse()
    elif why == "lost":
        core.rank.lost = "gone"
    else:
        core.limit(1)
        core.until_told()
    core.step_until(lambda: not core.scheduler.requests)
    assert core.cached_blocks() == PAGE_BLOCKS - 1


def test_a_request_that_needs_more_than_will_come_evicts_the_rest(core: Core) -> None:
    serve(core, 1, 2)
    core.limit(3)
    core.until_told()
    core.add("a", prompt(3, 2 * PROMPT))
    core.step()
    assert not core.scheduler.running
    core.rank.serve()
    core.step_until(lambda: not core.scheduler.requests)
    assert core.pages() == 3


def test_what_is_admitted_leaves_the_running_requests_their_next_blocks(core: Core) -> None:
    serve(core, 1)
    core.add("running", prompt(2, BLOCK_TOKENS - 2), max_tokens=5)
    core.step()
    core.rank.create(1)
    core.step_until(lambda: len(core.scheduler.running) == 1)
    # The new page has 15 free blocks, and one of them is the running request's next.
    core.add("a", prompt(3, 15 * BLOCK_TOKENS))
    core.step_until(lambda: not core.scheduler.requests)
    assert core.hit_blocks(prompt(1, PROMPT)) == PAGE_BLOCKS - 1


def test_an_admission_evicts_where_a_rank_hangs(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(core, 1)
    core.add("a", prompt(2, PROMPT))
    core.step()
    assert not core.scheduler.running
    monkeypatch.setattr("kvquota.agent.engines.vllm.adapter._PATIENCE_NS", 0)
    core.step_until(lambda: not core.scheduler.requests)
    assert core.cached_blocks() == PAGE_BLOCKS - 1


def test_requests_beyond_the_next_step_ask_for_no_memory(core: Core) -> None:
    core.scheduler.max_num_scheduled_tokens = PROMPT
    before = core.rank.asked - core.rank.drop_wanted
    core.rank.held = True
    for number in range(1, 6):
        core.add(f"b{number}", prompt(number, PROMPT))
    core.step()
    assert core.rank.asked - core.rank.drop_wanted <= before + 2


def test_vllm_allocates_alone_exactly_while_nothing_can_run_short(core: Core) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    core.scheduler.max_num_scheduled_tokens = BLOCK_TOKENS
    manager = core.scheduler.kv_cache_manager

    def alone() -> bool:
        core.step()
        return manager.allocate_slots.__func__ is KVCacheManager.allocate_slots

    for name in "ab":
        core.add(name, prompt(1, 8), max_tokens=200)
    assert not alone()
    core.step_until(lambda: len(core.scheduler.running) == 2)
    assert alone()
    core.limit(0)
    core.until_told()
    assert not alone()
    assert core.queue.usage()[3] == 1
    core.limit(None)
    core.until_told()
    core.add("waits", prompt(2, 8))
    assert not alone()
