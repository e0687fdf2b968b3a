"""The life of an arena on which calls fail: its books stay exact, and everything is given back."""

from collections.abc import Callable

from kvquota.native import Arena, ArenaReport, DriverError

from tests.native.arenas import GRANULE, done, wait_for

TRIES = 3
"""As often as a call is tried at once."""

_PAGE = 3 * GRANULE


class Life:
    """Pages of an arena are mapped and unmapped, and it is stopped, whatever fails meanwhile."""

    def __init__(self, arena: Arena, taken: Callable[[], int]) -> None:
        """`taken`: how many bytes the device says it has given."""
        self._arena = arena
        self._taken = taken
        self._seq = 0

    def live(self) -> None:
        """From start to end."""
        self._grow(2)
        self._apply([0, 1], [])
        self._grow(3)
        self._apply([3], [1])
        self._drop(1)
        self._apply([], [3])
        # What did not go at once has gone later, and a page that could not be mapped can be used again.
        wait_for(self._arena, lambda report: report.unmapped == 2 and not report.quarantined_credits)
        self._check(self._arena.report())
        self._apply([1], [])
        self._stop()

    def _apply(self, maps: list[int], unmaps: list[int]) -> None:
        self._seq += 1
        try:
            self._arena.apply(self._seq, maps, unmaps)
        except DriverError:
            assert {fault.page for fault in self._arena.report().faults} >= set(maps)
        self._check(done(self._arena, self._seq))

    def _grow(self, count: int) -> None:
        """Ask again for what was refused, until so many credits are held."""
        while True:
            report = self._arena.report()
            self._check(report)
            held = report.created - report.mapped - report.dropped
            if held >= count:
                return
            asked = report.created + report.refused + count - held
            self._arena.ask(asked, report.dropped)
            wait_for(self._arena, lambda report: report.created + report.refused == asked)  # noqa: B023

    def _drop(self, count: int) -> None:
        report = self._arena.report()
        dropped = report.dropped + count
        self._arena.ask(report.created + report.refused, dropped)
        self._check(wait_for(self._arena, lambda report: report.dropped == dropped))

    def _check(self, report: ArenaReport) -> None:
        """The books agree with each other, and with what the device says."""
        pages = report.created - report.dropped - report.unmapped + report.quarantined_credits
        assert report.held_bytes == pages * _PAGE
        taken = self._taken()
        assert taken <= report.held_bytes
        if not report.faults:
            assert taken == report.held_bytes

    def _stop(self) -> None:
        try:
            self._arena.close()
        except DriverError:
            self._arena.close()
