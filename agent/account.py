"""What was asked of one rank, and what it said."""

import logging
from dataclasses import dataclass, field

from kvquota.agent.contract import Rank, RankReport

_log = logging.getLogger(__name__)


@dataclass
class Account:
    """The credits of one rank, in cumulative pages since its start.

    Every credit that was asked for is one of: to be created, refused, dropped, or kept. One whose drop
    the rank has not acknowledged may still have memory behind it, but is relied on no more.
    """

    rank: Rank
    asked: int
    dropped: int = 0
    report: RankReport = field(default_factory=RankReport)
    refused: bool = False
    """The rank found no memory since it was last asked for more."""

    @property
    def net(self) -> int:
        """Credits that it keeps or will create, those used by maps included."""
        unserved = self.dropped - self.report.dropped
        return self.asked - self.dropped - max(0, self.report.refused - unserved)

    @property
    def kept(self) -> int:
        """Of those, the ones that are surely there."""
        return self.report.created - self.dropped

    @property
    def most(self) -> int:
        """Credits that it may have taken memory for by now."""
        return self.asked - self.report.refused - self.report.dropped

    def ask(self, net: int) -> None:
        """Have the rank keep `net` credits in all."""
        if net > self.net:
            self.asked += net - self.net
        elif net < self.net:
            # A rank gives up what it refused before what it holds.
            unserved = self.dropped - self.report.dropped
            self.dropped += self.net - net + max(0, self.report.refused - unserved)
        else:
            return
        self.rank.ask(self.asked, self.dropped)

    def read(self) -> RankReport:
        """Take in the newest report; returns the one before."""
        before, self.report = self.report, self.rank.report()
        if self.report.refused > before.refused:
            self.refused = True
        if self.report.faults != before.faults:
            for fault in set(self.report.faults).difference(before.faults):
                what = f"page {fault.page} of command {fault.seq}" if fault.page >= 0 else "a credit"
                _log.error(
                    "kvquota: %s: %s failed with %s (%d) for %s",
                    self.rank.name,
                    fault.operation,
                    fault.name,
                    fault.code,
                    what,
                )
        return before
