from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.agent.fake_daemon import FakeDaemon
from tests.agent.rig import AgentRig


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # pytest's own directories can be too long for a socket.
    with TemporaryDirectory(prefix="kvq") as folder:
        yield Path(folder) / "agent.sock"


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(socket_path) as daemon:
        yield daemon


@pytest.fixture
def rig(socket_path: Path) -> Iterator[Callable[..., AgentRig]]:
    """Makes rigs, and closes them at the end."""
    made: list[AgentRig] = []

    def make(**options: int | None) -> AgentRig:
        made.append(AgentRig(socket_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
