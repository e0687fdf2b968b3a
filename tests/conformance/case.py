"""What the conformance suite needs of an engine. One case for each adapter; the suite is the same for all."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Engine(Protocol):
    """A running engine with an agent. One that steps by itself, in other processes, ignores `step`."""

    def submit(self, prompt: Sequence[int], tokens: int) -> int:
        """Queue a request for exactly `tokens` greedy tokens; returns its number."""

    def output(self, request: int) -> list[int] | None:
        """The tokens of a finished request; None while it runs or waits. Raises where it failed."""

    def cached(self, request: int) -> int:
        """Prompt tokens of a finished request that came from the prefix cache."""

    def step(self) -> None:
        """One turn of the engine's main loop, page commands included. Does not wait."""

    def reset_prefix_cache(self) -> None:
        """As the engine's own call; only with no request running."""

    def sleep(self) -> None:
        """As the engine's own call that gives its KV memory back; only with no request running."""

    def wake_up(self) -> None:
        """As the engine's own call that ends it."""

    def memory_bytes(self) -> int:
        """KV memory that is physically there, as the kernel counts it: memfd blocks of all its processes."""

    def close(self) -> None:
        """End the engine and all it started."""


class EngineCase(Protocol):
    """How to make an engine, small enough for a test: 8 to 64 pages."""

    name: str

    vocabulary: int
    """Token ids from 1 to this are valid in a prompt."""

    tokens_per_page: int
    """Tokens whose KV fills one page."""

    longest: int
    """Prompt and output tokens of one request, at most; several pages."""

    floor: int
    """Pages that the engine cannot give up."""

    def make(self, environment: Mapping[str, str]) -> Engine:
        """Start an engine that joins as `environment` says (the KVQUOTA variables), with an empty cache."""
