"""The pages that an engine cannot give up while it is awake, page 0 onwards."""

from collections.abc import Set

from kvquota.agent.contract import Adapter


class Floor:
    """Asleep it goes like every other page. Awake it is the first that comes back."""

    def __init__(self, adapter: Adapter, pages: int) -> None:
        """In circulation from the start."""
        self.pages = pages
        self.asleep = False
        self._adapter = adapter
        self._out = 0

    @property
    def kept(self) -> int:
        """Its pages in circulation, as long as they cannot be given up."""
        return 0 if self.asleep else self.pages - self._out

    @property
    def missing(self) -> int:
        """Its pages out of circulation that should be in it."""
        return 0 if self.asleep else self._out

    def take(self) -> list[int]:
        """Out of circulation, where the engine sleeps and nothing but the null block is in use there."""
        if not self.asleep or self._out == self.pages:
            return []
        taken = self._adapter.take_floor()
        self._out = len(taken)
        return taken

    def put(self, allowed: int, gone: Set[int]) -> range:
        """What comes back for `allowed` credits: all of it, or nothing while a rank is not done with it.

        `gone`: pages out of circulation that still have memory.
        """
        floor = range(self.missing)
        if not floor or allowed < len(floor) or not gone.isdisjoint(floor):
            return range(0)
        self._adapter.put_floor()
        self._out = 0
        return floor
