"""What the balloon needs to know of the reference engine. Most of it is what its PageQueue knows already."""

from collections.abc import Callable, Sequence
from importlib.metadata import version

from kvquota.agent.contract import Counters
from kvquota.agent.engines.reference.scheduler import Block, Scheduler


class ReferenceAdapter:
    """The adapter contract over a scheduler, its PageQueue and the engine's `wake`.

    `blocks`: all of them, by id. `ranges`: (first, end) of the usable blocks of each page. `null_block`:
    whether block 0 is held for ever, and page 0 with it.
    """

    engine = f"reference {version('kvquota')}"

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: Sequence[Block],
        ranges: Sequence[tuple[int, int]],
        *,
        null_block: bool,
        wake: Callable[[], None],
    ) -> None:
        queue = scheduler.queue
        self._scheduler = scheduler
        self._queue = queue
        self._blocks = blocks
        self._ranges = ranges
        self._page_blocks = max(end - first for first, end in ranges)
        self._keep = (0,) if null_block else ()
        self._allowed = 0
        self._evicted = 0
        self.usage = queue.usage
        self.wake = wake

    def allow(self, pages: int) -> None:
        """The queue may grow by so many pages when it needs a block."""
        self._allowed = pages
        self._queue.allow(pages)

    def grown(self) -> list[int]:
        """Pages that it grew since the last call."""
        pages = self._queue.grown()
        self._allowed -= len(pages)
        return pages

    def take(self, pages: int) -> list[int]:
        """Take pages out of circulation; what they held of the prefix cache is forgotten."""
        taken = self._queue.victims(pages)
        for page in taken:
            self._take(page)
        return taken

    def _take(self, page: int) -> None:
        self._evicted += self._scheduler.forget(self._queue.take(page))

    def give(self, pages: Sequence[int]) -> None:
        """These pages may be grown again."""
        for page in pages:
            self._queue.give(page)

    def drain(self, pages: int) -> None:
        """Make exactly `pages` pinned pages draining. No hit may extend the life of what they hold."""
        for page in self._queue.drain(pages, keep=self._keep):
            first, end = self._ranges[page]
            self._evicted += self._scheduler.forget(self._blocks[first:end])

    def take_floor(self) -> list[int]:
        """Page 0, with the null block."""
        if self._queue.used_blocks(0) > 1:
            return []
        self._queue.prepend_n(self._blocks[:1])
        self._take(0)
        return [0]

    def put_floor(self) -> None:
        """Page 0, with the null block held again."""
        self._queue.put(0)
        self._queue.remove(self._blocks[0])

    def wanted(self) -> int:
        """Pages that the next step wants beyond those in circulation."""
        # Rather a new page than an eviction. What the queue may grow it counts as free.
        free = self._queue.num_uncached_blocks - self._allowed * self._page_blocks
        return max(0, self.pages_for(self._scheduler.missing() - free))

    def pages_for(self, blocks: int) -> int:
        """Pages that so many blocks take."""
        return -(-blocks // self._page_blocks)

    def busy(self) -> bool:
        """Whether requests run or wait."""
        return self._scheduler.busy

    def counters(self) -> Counters:
        """What operators see of the scheduler."""
        waiting = len(self._scheduler.waiting)
        return Counters(
            requests_waiting=waiting,
            requests_blocked=waiting if self._scheduler.starved else 0,
            blocks_evicted=self._evicted,
            refused=self._scheduler.refused,
            blocked_ns=self._scheduler.starved_ns,
        )
