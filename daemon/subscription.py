"""What a watcher has not looked at yet: names only, so one that stops reading delays nobody."""

import asyncio

from kvquota.daemon.errors import StoppingError


class Subscription:
    """Changes of the instances in `names`, or of all when None. One reader."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._stopping = False

    def covers(self, name: str) -> bool:
        """Whether `name` is asked for."""
        return self._names is None or name in self._names

    def mark(self, name: str) -> None:
        """`name` has changed, or is gone."""
        if self.covers(name):
            self._changed.add(name)
            self._wake.set()

    def stop(self) -> None:
        """End the reader's wait for good."""
        self._stopping = True
        self._wake.set()

    async def changes(self) -> list[str]:
        """Names that changed since the last call, once there are any. Raises StoppingError."""
        await self._wake.wait()
        if self._stopping:
            raise StoppingError("kvquotad is stopping: ask again when it is back")
        self._wake.clear()
        changed, self._changed = self._changed, set()
        return sorted(changed)
