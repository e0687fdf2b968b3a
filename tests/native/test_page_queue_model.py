"""PageQueue against its model, whatever is done to both."""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvquota.native import PageQueue

from tests.native.queue_model import BLOCKS, PAGES, Block, Model, ids


class QueueMachine(RuleBasedStateMachine):
    """PageQueue and the model do the same things and must say the same."""

    @initialize()
    def start(self) -> None:
        self.blocks = [Block(number) for number in range(BLOCKS)]
        self.queue = PageQueue(self.blocks, PAGES)
        self.model = Model()

    def pick(self, data: st.DataObject, of: Sequence[int]) -> int:
        return data.draw(st.sampled_from(sorted(of)))

    @rule(pages=st.integers(0, 8))
    def allow(self, pages: int) -> None:
        self.queue.allow(pages)
        self.model.allowed = pages

    @rule(count=st.integers(0, 12), for_running=st.booleans())
    def pop(self, count: int, for_running: bool) -> None:
        self.queue.for_running = for_running
        if count > self.model.free(for_running=for_running):
            with pytest.raises(ValueError, match=f"cannot hand out {count} blocks"):
                self.queue.popleft_n(count)
        else:
            popped = self.queue.popleft_n(count) if count != 1 else [self.queue.popleft()]
            assert ids(popped) == [self.model.pop() for _ in range(count)]
            for block in popped:
                assert block.ref_cnt == 0
                block.ref_cnt = 1
        self.queue.for_running = False

    @rule(data=st.data(), cached=st.booleans())
    def release(self, data: st.DataObject, cached: bool) -> None:
        chosen = data.draw(st.permutations(sorted(self.model.used)))
        chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
        blocks = [self.blocks[number] for number in chosen]
        for block in blocks:
            block.ref_cnt = 0
        if cached and len(blocks) == 1:
            self.queue.append(blocks[0])
        elif cached:
            self.queue.append_n(blocks)
        else:
            self.queue.prepend_n(blocks)
        self.model.release(list(chosen), cached=cached)

    @rule(data=st.data(), cached=st.booleans())
    def release_wrongly(self, data: st.DataObject, cached: bool) -> None:
        wrong = self.pick(data, [number for number in range(BLOCKS) if number not in self.model.used])
        good = [self.blocks[number] for number in sorted(self.model.used)]
        for batch in ([*good, self.blocks[wrong]], [*good[:1], *good[:1]]):
            if batch:
                with pytest.raises(ValueError, match=r"block \d+ is (free already|withheld)"):
                    (self.queue.append_n if cached else self.queue.prepend_n)(batch)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, BLOCKS - 1))
        if number in self.model.order() + self.model.reserved:
            self.queue.remove(self.blocks[number])
            self.model.remove(number)
            self.blocks[number].ref_cnt = 2
        else:
            state = "used" if number in self.model.used else "withheld"
            with pytest.raises(ValueError, match=f"block {number} is {state}"):
                self.queue.remove(self.blocks[number])

    @rule(page=st.integers(0, len(PAGES) - 1))
    def put(self, page: int) -> None:
        if page in self.model.inside or page in self.model.taken:
            with pytest.raises(ValueError, match=f"page {page} is"):
                self.queue.put(page)
        else:
            self.queue.put(page)
            self.model.circulate(page)

    @rule(count=st.integers(0, 8))
    def take_victims(self, count: int) -> None:
        victims = self.queue.victims(count)
        assert victims == self.model.victims()[:count]
        for page in victims:
            assert ids(self.queue.take(page)) == self.model.take(page)

    @rule(data=st.data())
    def take_wrongly(self, data: st.DataObject) -> None:
        page = self.pick(data, range(len(PAGES)))
        if page not in self.model.victims():
            with pytest.raises(ValueError, match=f"page {page} .*(block \\d+ is used|not in circulation)"):
                self.queue.take(page)

    @rule(page=st.integers(0, len(PAGES) - 1))
    def give(self, page: int) -> None:
        if page in self.model.taken:
            self.queue.give(page)
            self.model.taken.remove(page)
        else:
            with pytest.raises(ValueError, match=f"page {page} is not taken"):
                self.queue.give(page)

    @rule(count=st.integers(0, 8), keep=st.sets(st.integers(0, len(PAGES) - 1), max_size=2))
    def drain(self, count: int, keep: set[int]) -> None:
        assert self.queue.drain(count, keep=sorted(keep)) == self.model.drain(count, keep)

    @rule()
    def uncache_all(self) -> None:
        self.queue.uncache_all()
        for page in range(len(PAGES)):
            self.model.uncache(page)

    @rule()
    def grown(self) -> None:
        assert self.queue.grown() == self.model.grown
        self.model.grown = []

    @precondition(lambda self: hasattr(self, "queue"))
    @invariant()
    def same(self) -> None:
        queue, model = self.queue, self.model
        queue.check()
        assert queue.num_free_blocks == model.free()
        assert queue.num_uncached_blocks == model.free() - len(model.cached)
        assert ids(queue.get_all_free_blocks()) == model.order()
        queue.for_running = True
        assert queue.num_free_blocks == model.free(for_running=True)
        assert ids(queue.get_all_free_blocks()) == model.order()
        assert ids(list(queue.iter_blocks_after(None))) == model.order()
        queue.for_running = False
        assert queue.usage() == model.usage()
        assert queue.num_used_blocks == len(model.used)
        assert queue.max_free_blocks == sum(end - first for first, end in PAGES) - len(model.used)
        for page in range(len(PAGES)):
            assert queue.in_circulation(page) == (page in model.inside)
            assert queue.used_blocks(page) == model.used_in(page)
            for block in model.blocks(page):
                inside = page in model.inside
                assert (self.blocks[block].ref_cnt > 0) == (block in model.used or not inside)
                assert queue.is_draining(self.blocks[block]) == (page in model.draining)
        assert self.blocks[4].ref_cnt == self.blocks[13].ref_cnt == 1


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
