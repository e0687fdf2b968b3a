"""The contract between the balloon and what it stands on: its engine's adapter and its ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Usage(NamedTuple):
    """Pages in circulation, by what their blocks hold. `draining` is a part of `pinned`."""

    pinned: int
    evictable: int
    empty: int
    draining: int


@dataclass(frozen=True)
class PageCommand:
    """What every rank must do before the step that carries it runs: unmap behind its fence, then map.

    It travels by the engine's own path, in order with model execution. It is made of plain ints and tuples,
    so any serializer of an engine carries it.
    """

    seq: int
    maps: tuple[int, ...] = ()
    unmaps: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankFault:
    """A driver call that failed on a rank, for a page of command `seq`, and that nothing has made good yet.

    It stands until the page's memory is released: a page that could not be unmapped is tried again, a bounded
    number of times; one that could not be mapped goes when a command unmaps it. `page` is -1 where the call
    was for no page: such a fault stands until the same call succeeds, for a credit that is created, say.
    """

    seq: int
    page: int
    operation: str
    code: int
    name: str


@dataclass(frozen=True)
class RankReport:
    """One instant of a rank. Counts are pages, cumulative since its start: a lost report costs nothing.

    `done`: the last command whose maps and unmaps are over. `faults`: those that stand. A page that a command
    up to `done` unmaps has no memory on this rank any more, unless it has a fault.

    Every credit asked for is one of: to be created, refused, dropped, or kept. `dropped` counts those
    given back and those cancelled before they were created; the latter count as `created` too, so that what
    a rank holds is always created - mapped by a command - dropped. `refused` falls by those dropped later.
    `quarantined_credits`: those of `dropped` whose memory could not be released so far; not cumulative.
    """

    done: int = 0
    created: int = 0
    refused: int = 0
    dropped: int = 0
    quarantined_credits: int = 0
    faults: tuple[RankFault, ...] = field(default=())


class Rank(Protocol):
    """The leader's view of one rank. A rank in the leader's process is the same object, called directly.

    All but `fileno` and `ready` is called on the engine thread.
    """

    name: str
    """As shown to operators: `rank 1`."""

    page_bytes: int
    """What one page takes on this rank's device."""

    lost: str | None
    """Why the rank is lost; None while it lives."""

    def ask(self, asked: int, dropped: int) -> None:
        """Want `asked` credits in all since the start, of which `dropped` are given back. Never blocks.

        Each asked credit is created, refused (out of memory: the rank stops and does not retry by itself) or
        dropped: first those to be created, then refused ones, then held ones. The leader drops only what no
        command uses.
        """

    def report(self) -> RankReport:
        """The newest report; of a lost rank the last one. Never blocks."""

    def wait(self, created: int, timeout: float) -> None:
        """Wait up to `timeout` seconds until the rank has created that many credits in all.

        Also returns once the rank has refused a credit since, or is lost.
        """

    def attach(self, record_fd: int) -> None:
        """Take memory against this device record from now on. The descriptor stays the caller's."""

    def fileno(self) -> int:
        """Readable when the rank has something new to say, or is lost. The watcher polls it."""

    def ready(self) -> bool:
        """Read what came, on the watcher thread. False when nothing will come any more: the rank is lost."""

    def close(self) -> None:
        """Let go of the rank. May be called twice."""


class Counters(NamedTuple):
    """What an engine counts for operators; the totals are since its start."""

    requests_waiting: int = 0
    requests_blocked: int = 0
    """Of those, the ones that wait for memory."""
    blocks_evicted: int = 0
    """Cached blocks that left with a page."""
    refused: int = 0
    """Allocations refused for want of memory."""
    blocked_ns: int = 0
    """Time that requests waited for memory."""


class Adapter(Protocol):
    """The only code that knows its engine. All but `wake` is called on the engine thread, between steps."""

    engine: str
    """Name and version, as shown to operators: `vllm 0.32.0`."""

    def usage(self) -> tuple[int, int, int, int]:
        """Pages in circulation now, in the order of Usage. Asked every step: PageQueue.usage will do."""

    def allow(self, pages: int) -> None:
        """At most `pages` more may be put in circulation from now on: every rank holds a credit for each."""

    def grown(self) -> Sequence[int]:
        """Pages put in circulation since the last call, each for one allowed credit. Asked every step."""

    def take(self, pages: int) -> list[int]:
        """Take up to `pages` out of circulation: empty ones first, then evictable, least recently used first.

        Cached blocks in them go through the engine's own eviction path. Never a page with a block in use. A
        page that was taken is not grown again before it is given.
        """

    def give(self, pages: Sequence[int]) -> None:
        """Every rank is done with these taken pages: they may be grown again, each for a credit."""

    def drain(self, pages: int) -> None:
        """Make exactly `pages` of the pinned pages draining, emptiest first; those over are undone.

        The floor page never goes, so it drains after all others.
        """

    def take_floor(self) -> list[int]:
        """The KV cache sleeps: take the floor's pages out of circulation, its null block with them.

        None where another block on them is in use.
        """

    def put_floor(self) -> None:
        """Put the floor back in circulation, its null block in use; its pages were given. Not for grown()."""

    def wanted(self) -> int:
        """Pages beyond those in circulation that requests will want in the next steps. Asked every step."""

    def busy(self) -> bool:
        """Whether the engine has requests to serve: a pass is then short."""

    def counters(self) -> Counters:
        """What the engine counts. It is asked when the books change."""

    def wake(self) -> None:
        """Make the engine thread look at the agent soon. Any thread, any time; never blocks."""
