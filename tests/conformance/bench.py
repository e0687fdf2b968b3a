"""An engine on the bench: what a test does to it, and what it sees of it, whatever engine it is."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvquota.native import Observed
from kvquota.native.status import Reason, Status

from tests.agent.fake_daemon import Connection, FakeDaemon
from tests.conformance.case import EngineCase

TIMEOUT = 30.0


class Bench:
    """One engine, its daemon's end of the connection, and prompts to give it."""

    def __init__(self, case: EngineCase, daemon: FakeDaemon, socket: Path) -> None:
        self.case = case
        self.daemon = daemon
        self.engine = case.make(
            {
                "KVQUOTA": "1",
                "KVQUOTA_AGENT_SOCKET": str(socket),
                "KVQUOTA_INSTANCE": "conformance",
                "KVQUOTA_RESERVE_BYTES": "0",
                "KVQUOTA_HOST_FILL": "0xff",
            }
        )
        self.connection: Connection = daemon.connection()
        self.revision = 0
        self._random = random.Random(7)

    @property
    def page_bytes(self) -> int:
        return self.connection.read().page_bytes

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that shares no prefix with any other."""
        return [self._random.randint(1, self.case.vocabulary) for _ in range(tokens)]

    def limit(self, pages: float | None) -> int:
        """Set a limit; returns its revision."""
        self.revision += 1
        limit_bytes = None if pages is None else int(pages * self.page_bytes)
        self.connection.limit(limit_bytes, self.revision)
        return self.revision

    def wait(self, reached: Callable[[Observed], bool]) -> Observed:
        return self.connection.wait(reached, self.engine.step)

    def applied(self, revision: int) -> Observed:
        return self.wait(lambda seen: seen.revision_applied == revision)

    def standing(self) -> tuple[Status, Reason]:
        return self.connection.standing()

    def finish(self, requests: Sequence[int]) -> list[list[int]]:
        """Run until all these requests are finished; returns their tokens."""
        end = time.monotonic() + TIMEOUT
        outputs: list[list[int]] = []
        for request in requests:
            while (output := self.engine.output(request)) is None:
                assert time.monotonic() < end, f"request {request} does not finish: {self.standing()}"
                self.engine.step()
                time.sleep(0)
            outputs.append(output)
        return outputs

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        return self.finish([self.engine.submit(prompt, tokens) for prompt in prompts])

    def fill(self, pages: int) -> list[list[int]]:
        """Serve prompts until so many pages are full of their cache; returns the prompts, oldest first."""
        prompts: list[list[int]] = []
        size = min(self.case.longest // 2, self.case.tokens_per_page // 2)
        while True:
            batch = [self.prompt(size) for _ in range(4)]
            self.run(batch, 2)
            prompts += batch
            seen = self.connection.read()
            if seen.evictable_pages >= pages:
                return prompts
            assert len(prompts) * size < 4 * pages * self.case.tokens_per_page, "the cache does not fill"
