from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.agent.fake_daemon import FakeDaemon
from tests.conformance.bench import Bench
from tests.conformance.case import EngineCase

# Each `NAME_case.py` beside this file has a CASE. Those that need another environment bear its mark.
_NAMES = sorted(path.stem.removesuffix("_case") for path in Path(__file__).parent.glob("*_case.py"))
_MARKS = {"vllm": [pytest.mark.vllm]}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=_MARKS.get(name, [])) for name in _NAMES])
def case(request: pytest.FixtureRequest) -> EngineCase:
    found: EngineCase = import_module(f"tests.conformance.{request.param}_case").CASE
    return found


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvq") as folder:
        yield Path(folder) / "agent.sock"


@pytest.fixture
def bench(case: EngineCase, socket_path: Path) -> Iterator[Bench]:
    """A fresh engine that has joined a daemon which the test plays."""
    with FakeDaemon(socket_path) as daemon:
        bench = Bench(case, daemon, socket_path)
        try:
            yield bench
        finally:
            bench.engine.close()
