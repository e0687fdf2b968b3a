"""The agent of one engine: what an adapter calls around its scheduling steps."""

from collections.abc import Sequence

from kvquota.agent.contract import Adapter, PageCommand, Rank
from kvquota.agent.settings import Settings


class Agent:
    """Keeps an engine's KV memory at its limit. Everything is called on the engine thread.

    Each step: begin_step(), scheduling, end_step(), and the command that end_step returned goes to every rank
    before the step runs. An idle engine that was woken calls poll(), and makes one step where needs_step
    says so.
    """

    def __init__(
        self, adapter: Adapter, ranks: Sequence[Rank], *, pages: int, floor: int, settings: Settings
    ) -> None:
        """Join the daemon if there is one, and start the watcher.

        `pages`: all of the address range. `floor`: 1 where page 0 holds the null block, already mapped on
        every rank (ask 1, apply seq 0) and in circulation; else 0. Raises SettingError where the daemon
        refuses the instance.
        """
        raise NotImplementedError

    def begin_step(self) -> None:
        """At the top of a scheduling step: act on a new limit, take pages out of circulation, ask for
        credits.
        """
        raise NotImplementedError

    def end_step(self) -> PageCommand | None:
        """After scheduling, before the step is dispatched: what every rank must do first; None for nothing."""
        raise NotImplementedError

    def poll(self) -> None:
        """While the engine is idle, whenever it was woken: read what ranks said and publish. Takes no page."""
        raise NotImplementedError

    @property
    def needs_step(self) -> bool:
        """Whether an idle engine should make one step. False while only ranks or running requests are
        awaited.
        """
        raise NotImplementedError

    def grow_now(self, pages: int, timeout: float = 0.005) -> int:
        """Ask for credits and wait a bounded moment, for a running request that would be preempted otherwise.

        Returns how many pages may be put in circulation now; 0 at once where the target allows no growth.
        `timeout`: seconds.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leave the daemon, let go of the ranks, stop the watcher. Bounded; may be called twice."""
        raise NotImplementedError
