"""The contract between the balloon and what it stands on: an engine's adapter on one side, its ranks on the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Usage(NamedTuple):
    """Pages in circulation, by what their blocks hold: pinned + evictable + empty. `draining` is a part of `pinned`."""

    pinned: int
    evictable: int
    empty: int
    draining: int


@dataclass(frozen=True)
class PageCommand:
    """What every rank must do before the step that carries it runs: unmap behind its fence, then map.

    It travels by the engine's own path, in order with model execution. It is made of plain ints and tuples, so any
    serializer of an engine carries it.
    """

    seq: int
    maps: tuple[int, ...] = ()
    unmaps: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankFault:
    """A driver call that failed on a rank, after the bounded retries, for one page of command `seq`."""

    seq: int
    page: int
    operation: str
    code: int
    name: str


@dataclass(frozen=True)
class RankReport:
    """One instant of a rank. Counts are pages, cumulative since its start, so a report that is lost costs nothing."""

    done: int = 0
    created: int = 0
    refused: int = 0
    dropped: int = 0
    held_bytes: int = 0
    faults: tuple[RankFault, ...] = field(default=())


class Rank(Protocol):
    """The leader's view of one rank. A rank in the leader's process is the same object, called directly."""

    page_bytes: int

    def ask(self, asked: int, dropped: int) -> None:
        """Want `asked` credits in all since the start, of which `dropped` are given back. Never blocks.

        A rank may create up to `asked - dropped - refused` in all; what it drops comes first from those not yet
        created. The leader drops only credits that no command it sent counts on.
        """

    def report(self) -> RankReport | None:
        """The newest report; None when the rank is lost. Never blocks."""


class Adapter(Protocol):
    """The only code that knows its engine. All but `wake` is called on the engine thread, between steps."""

    engine: str
    """Name and version, as shown to operators: `vllm 0.32.0`."""

    def usage(self) -> Usage:
        """Pages in circulation now. O(1): it is asked every step."""

    def allow(self, pages: int) -> None:
        """At most `pages` more pages may be put in circulation: every rank holds a credit for each."""

    def grown(self) -> Sequence[int]:
        """Pages put in circulation since the last call, each for one allowed credit."""

    def take(self, pages: int) -> list[int]:
        """Take up to `pages` out of circulation: empty ones first, then evictable, least recently used first.

        Cached blocks in them go through the engine's own eviction path. Never a page with a block in use.
        """

    def drain(self, pages: int) -> None:
        """Make exactly `pages` of the pinned pages draining, emptiest first; those over are undone."""

    def wanted(self) -> int:
        """Pages beyond those in circulation that requests will want in the next few steps; 0 when nothing waits."""

    def busy(self) -> bool:
        """Whether the engine has requests to serve: a pass is then short."""

    def wake(self) -> None:
        """Make the engine thread look at the agent soon. Any thread, any time; never blocks."""
