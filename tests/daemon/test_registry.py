"""The registry on a disk that is slow: nobody else waits for it, and changes keep their order."""

import asyncio
import threading
from pathlib import Path

from kvquota.daemon.registry import Device, LimitChange, Registry
from kvquota.daemon.spec import Spec
from kvquota.daemon.spec_store import SpecStore

TIMEOUT = 10.0


class SlowStore(SpecStore):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writing = threading.Event()
        self.go_on = threading.Event()

    def write(self, spec: Spec) -> None:
        self.writing.set()
        assert self.go_on.wait(TIMEOUT)
        super().write(spec)


def change(limit_bytes: int, expected: int) -> LimitChange:
    return LimitChange("a", limit_bytes, None, expected, create=True, set_by="me")


def test_the_loop_serves_others_while_a_spec_is_written(tmp_path: Path) -> None:
    SpecStore(tmp_path).write(Spec("b", limit_bytes=7, revision=1))
    store = SlowStore(tmp_path)
    registry = Registry(store, Device("host", "boot", []))

    async def set_twice() -> list[int]:
        changes = [asyncio.create_task(registry.set_limit(change(5 + n, n))) for n in range(2)]
        await asyncio.to_thread(store.writing.wait, TIMEOUT)
        assert registry.view("b").limit_bytes == 7
        assert not registry.knows("a"), "in force before it is durable"
        store.go_on.set()
        return await asyncio.wait_for(asyncio.gather(*changes), TIMEOUT)

    assert asyncio.run(set_twice()) == [1, 2]
    assert registry.view("a").limit_bytes == 6
    assert SpecStore(tmp_path).load()["a"].revision == 2
