"""A real daemon and reference engines in processes of their own, as an operator has them."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from kvquota.agent.engines.reference.engine import Completion
from kvquota.agent.engines.reference.process import EngineProcess, memfd_bytes
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import TIMEOUT, DaemonProcess, until
from tests.support.reference import PAGE_BLOCKS, PAGE_BYTES

NAME = "engine"
PAGES = 64


class Scene:
    """One daemon, one model, any number of engines. Nothing survives `close`."""

    def __init__(self, daemon: DaemonProcess, model: Path) -> None:
        self.daemon = daemon
        self._model = model
        self._engines: list[EngineProcess] = []

    def start(
        self,
        *options: str,
        name: str = NAME,
        reserve: int = 4 * PAGE_BYTES,
        program: Sequence[str] | None = None,
    ) -> EngineProcess:
        """An elastic engine that serves: 64 pages of address range, fresh memory filled with 0xff."""
        environment = {
            **self.daemon.environment(name),
            "KVQUOTA_RESERVE_BYTES": str(reserve),
            "KVQUOTA_HOST_FILL": "255",
        }
        engine = EngineProcess(
            ["--model", str(self._model), "--blocks", str(PAGES * PAGE_BLOCKS), *options],
            environment=environment,
            program=program or EngineProcess.PROGRAM,
        )
        self._engines.append(engine)
        engine.ready.result(60)
        return engine

    def status(self, name: str = NAME) -> pb.Instance:
        return self.daemon.get(name)

    def until_joined(self, name: str = NAME) -> None:
        """Wait until the engine is connected to the daemon that runs now."""

        def joined() -> bool:
            with self.daemon.stub("read") as stub:
                instances = stub.ListInstances(pb.ListInstancesRequest(), timeout=TIMEOUT).instances
            return any(instance.name == name and instance.connected for instance in instances)

        until("the engine to join", joined)

    def limit(self, pages: float | None, engine: EngineProcess, name: str = NAME) -> pb.Instance:
        """Set a limit and wait until it is settled. If it is applied, the kernel must agree."""
        limit = None if pages is None else int(pages * PAGE_BYTES)
        answer = self.daemon.set(name, limit, wait=True)
        held = memfd_bytes(engine.pid)
        assert not answer.timed_out, answer.instance
        assert answer.instance.settled
        if answer.instance.status == pb.STATUS_APPLIED and limit is not None:
            assert held <= limit
            assert answer.instance.mapped_bytes <= limit
        return answer.instance

    def until_pages(self, engine: EngineProcess, low: int, high: int) -> None:
        """Wait until the kernel counts from `low` to `high` pages behind the engine's KV cache."""
        until(
            f"{low} to {high} pages",
            lambda: low * PAGE_BYTES <= memfd_bytes(engine.pid) <= high * PAGE_BYTES,
        )

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()


def results(futures: Sequence[Future[Completion]]) -> list[list[int]]:
    """The tokens of every request: all of them succeed."""
    return [future.result(60).tokens for future in futures]
