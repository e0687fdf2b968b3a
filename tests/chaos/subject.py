"""What a storm asks of the engine that it rages over: the one part of it that knows which engine that is."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol


class KilledError(Exception):
    """The request went down with an engine that the storm had killed."""


class Subject(Protocol):
    """One elastic engine, an instance of the storm's daemon. Pages are its own."""

    name: str
    """Of the engine, as the command line of a storm names it."""

    instance: str
    page_bytes: int
    pages: int
    floor: int
    at_once: int
    """Requests that it has to serve or to keep waiting at a time."""

    hangs_up: float
    """The part of its clients that do not wait for the end."""

    @property
    def pid(self) -> int:
        """The leader's."""

    def answers(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """What the unmodified engine says to each prompt."""

    def start(self) -> None:
        """Start it, and return once it serves and has joined."""

    def submit(self, prompt: Sequence[int], most: int, patience: float | None) -> "Future[list[int]]":
        """The tokens of one request; those that came within `patience` seconds where it is given.

        The future raises KilledError, or what is wrong.
        """

    def events(self) -> list[Callable[[], None]]:
        """What happens to it beside what can happen to every engine. Each is as likely as any other event."""

    def held_bytes(self, pid: int) -> int:
        """What the kernel counts behind the KV cache of the engine that `pid` leads, or led."""

    def books(self) -> list[str]:
        """What is wrong inside, once it is at rest."""

    def stop(self) -> list[str]:
        """End it as its user would. What was wrong with that."""

    def close(self) -> None:
        """Leave nothing of it, whatever became of it."""
