"""The rank in the leader's own process: its arena, called directly."""

import os

from kvquota.agent.contract import PageCommand, RankFault, RankReport
from kvquota.native import Arena, ArenaReport, HostDriver


class LocalRank:
    """A rank whose arena is in this process. The arena stays its maker's to close, after the agent."""

    def __init__(self, arena: Arena, driver: HostDriver | None = None, name: str = "rank 0") -> None:
        """`driver`: the host driver of the arena, which takes its memory against a device record."""
        self.name = name
        self.page_bytes = arena.page_bytes
        self.lost: str | None = None
        self._arena = arena
        self._driver = driver

    def ask(self, asked: int, dropped: int) -> None:
        """See Rank."""
        self._arena.ask(asked, dropped)

    def report(self) -> RankReport:
        """See Rank."""
        return rank_report(self._arena.report())

    def wait(self, created: int, timeout: float) -> None:
        """See Rank."""
        self._arena.wait_credits(created, timeout)

    def attach(self, record_fd: int) -> None:
        """See Rank."""
        if self._driver is not None:
            self._driver.attach(record_fd)

    def apply(self, command: PageCommand) -> None:
        """Do what the command says, on the thread that submits the step's work.

        Raises DriverError where pages could not be mapped: none of them can be used. The rest is done.
        """
        self._arena.apply(command.seq, command.maps, command.unmaps)

    def fileno(self) -> int:
        """See Rank."""
        return self._arena.fileno()

    def ready(self) -> bool:
        """See Rank."""
        drain(self._arena)
        return True

    def close(self) -> None:
        """See Rank."""


def rank_report(report: ArenaReport) -> RankReport:
    """What an arena says, as a leader reads it."""
    return RankReport(
        done=report.done,
        created=report.created,
        refused=report.refused,
        dropped=report.dropped,
        quarantined_credits=report.quarantined_credits,
        faults=tuple(RankFault(f.seq, f.page, f.operation, f.code, f.name) for f in report.faults),
    )


def drain(arena: Arena) -> None:
    """Take the arena's ring, so that its descriptor is readable again at the next change only."""
    try:
        os.eventfd_read(arena.fileno())
    except BlockingIOError:
        return
