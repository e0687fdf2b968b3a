"""How a real vLLM starts, joins and ends: without a daemon, with odd sizes, by SIGKILL, without KVQUOTA."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import DaemonProcess, until
from tests.support.session import abstract_addresses
from tests.support.vllm import Engine, EngineError
from tests.support.vllm_pages import BLOCK_TOKENS, OUTPUT, PAGE_BYTES, model, prompts, start

pytestmark = pytest.mark.vllm

NAME = "vllm"
BLOCKS = 12 * 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What vLLM answers to the first prompts without kvquota, which it then knows nothing of."""
    with running(checkpoint, {}) as stock:
        tokens = [reply.tokens for reply in stock.generate(prompts(range(10)), OUTPUT)]
        assert stock.kv_bytes() == 0
        for pid in stock.pids():
            assert "kvquota" not in Path(f"/proc/{pid}/maps").read_text()
            names = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
            assert not [name for name in names if "kvquota" in name]
        return tokens


@contextmanager
def running(
    checkpoint: Path, environment: Mapping[str, str], blocks: int = BLOCKS, **options: object
) -> Iterator[Engine]:
    engine = start(checkpoint, dict(environment), blocks, **options)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """Not started."""
    process = DaemonProcess(tmp_path)
    yield process
    if process.process is not None and not process.process_ended():
        assert process.stop() == 0


def joins(daemon: DaemonProcess, **more: str) -> dict[str, str]:
    return {
        **daemon.environment(NAME),
        "KVQUOTA_HOST_FILL": "255",
        "KVQUOTA_RESERVE_BYTES": str(4 * PAGE_BYTES),
        **more,
    }


def serve(engine: Engine, expected: list[list[int]]) -> None:
    assert [reply.tokens for reply in engine.generate(prompts(range(10)), OUTPUT)] == expected


def test_an_engine_without_a_daemon_runs_and_comes_under_its_spec_when_one_appears(
    checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    daemon.start()
    daemon.set(NAME, 3 * PAGE_BYTES, create=True)
    daemon.kill()
    with running(checkpoint, joins(daemon)) as engine:
        serve(engine, expected)
        assert engine.kv_bytes() > 8 * PAGE_BYTES
        daemon.start()
        until("the spec is applied", lambda: daemon.get(NAME).status == pb.STATUS_APPLIED)
        assert engine.kv_bytes() <= 3 * PAGE_BYTES
        serve(engine, expected)
        assert engine.kv_bytes() <= 3 * PAGE_BYTES


def test_a_limit_set_before_the_engine_starts_holds_from_its_first_page(
    checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    daemon.start()
    daemon.set(NAME, 2 * PAGE_BYTES, create=True)
    with running(checkpoint, joins(daemon)) as engine:
        assert engine.kv_bytes() <= 2 * PAGE_BYTES
        serve(engine, expected)
        assert engine.kv_bytes() <= 2 * PAGE_BYTES


def test_without_any_daemon_the_default_limit_holds(
    checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    with running(checkpoint, joins(daemon, KVQUOTA_DEFAULT_LIMIT="24M")) as engine:
        serve(engine, expected)
        assert engine.kv_bytes() <= 3 * PAGE_BYTES


@pytest.mark.parametrize(
    ("blocks", "block_tokens", "pages"),
    [(41, BLOCK_TOKENS, 3), (1000, BLOCK_TOKENS, 63), (4001, BLOCK_TOKENS, 251), (100, 96, 10)],
    ids=["the last page is half there", "1000", "4001", "blocks that straddle pages"],
)
def test_block_counts_that_fill_no_page(
    checkpoint: Path,
    daemon: DaemonProcess,
    expected: list[list[int]],
    blocks: int,
    block_tokens: int,
    pages: int,
) -> None:
    daemon.start()
    kv_bytes = blocks * block_tokens * (PAGE_BYTES // 512)
    with running(
        checkpoint,
        joins(daemon),
        blocks,
        block_size=block_tokens,
        kv_cache_memory_bytes=kv_bytes,
        max_model_len=1024,
    ) as engine:
        for _ in range(2):
            serve(engine, expected)
        instance = daemon.get(NAME)
        assert instance.capacity_bytes == pages * instance.page_bytes
        assert daemon.set(NAME, instance.page_bytes, wait=True).instance.status == pb.STATUS_APPLIED
        assert engine.kv_bytes() <= instance.page_bytes
        daemon.set(NAME, None)
        serve(engine, expected)


def test_asynchronous_scheduling(checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]) -> None:
    daemon.start()
    with running(checkpoint, joins(daemon), async_scheduling=True) as engine:
        serve(engine, expected)
        for pages in (6, 2):
            assert daemon.set(NAME, pages * PAGE_BYTES, wait=True).instance.status == pb.STATUS_APPLIED
            assert engine.kv_bytes() <= pages * PAGE_BYTES
            serve(engine, expected)
            assert engine.kv_bytes() <= pages * PAGE_BYTES
        daemon.set(NAME, 0, wait=True)
        held = [engine.request(prompt, OUTPUT) for prompt in prompts(range(10))]
        until("the requests are held", lambda: daemon.get(NAME).requests_blocked == 10)
        daemon.set(NAME, None)
        assert [future.result(60).tokens for future in held] == expected


def test_sigkill_of_every_process_leaves_nothing(
    checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    daemon.start()
    daemon.set(NAME, 6 * PAGE_BYTES, create=True)
    with running(checkpoint, joins(daemon)) as engine:
        mine = abstract_addresses(engine.pids())
        assert mine
        serve(engine, expected)
        for prompt in prompts(range(10)):
            engine.request(prompt, 200)
        engine.kill()
        until("they are gone", lambda: engine.pids() == [])
    until("the daemon sees it", lambda: not daemon.get(NAME).connected)
    assert f" lost instance={NAME} " in daemon.log
    until("no address is left", lambda: not mine & abstract_addresses())
    assert daemon.get(NAME).limit_bytes == 6 * PAGE_BYTES
    # Its name is free, and so is its memory.
    with running(checkpoint, joins(daemon)) as engine:
        serve(engine, expected)
        assert daemon.get(NAME).connected


def test_an_ending_engine_leaves_nothing(checkpoint: Path, daemon: DaemonProcess) -> None:
    daemon.start()
    with running(checkpoint, joins(daemon)) as engine:
        mine = abstract_addresses(engine.pids())
        assert mine
        engine.generate(prompts(range(2)), OUTPUT)
    assert engine.pids() == []
    until("the daemon sees it", lambda: not daemon.get(NAME).connected)
    assert f" left instance={NAME} " in daemon.log
    until("no address is left", lambda: not mine & abstract_addresses())


def test_flags_do_what_the_entry_point_does(
    checkpoint: Path, daemon: DaemonProcess, expected: list[list[int]]
) -> None:
    daemon.start()
    package = "kvquota.agent.engines.vllm"
    classes = {"scheduler_cls": f"{package}.KvquotaScheduler", "worker_cls": f"{package}.KvquotaWorker"}
    with running(checkpoint, joins(daemon, VLLM_PLUGINS=""), BLOCKS, **classes) as engine:
        serve(engine, expected)
        daemon.set(NAME, 2 * PAGE_BYTES, wait=True)
        assert 0 < engine.kv_bytes() <= 2 * PAGE_BYTES


def test_half_of_the_flags_is_refused(checkpoint: Path, daemon: DaemonProcess) -> None:
    worker = "vllm.v1.worker.cpu_worker.CPUWorker"
    with pytest.raises(EngineError), running(checkpoint, joins(daemon), worker_cls=worker):
        pass


def test_a_bad_setting_is_refused_by_name(checkpoint: Path, daemon: DaemonProcess) -> None:
    with (
        pytest.raises(EngineError, match="KVQUOTA_RESERVE_BYTES is '12Q'"),
        running(checkpoint, joins(daemon, KVQUOTA_RESERVE_BYTES="12Q")),
    ):
        pass


def test_a_map_that_fails_ends_the_engine_as_any_failed_step_does(
    checkpoint: Path, daemon: DaemonProcess
) -> None:
    daemon.start()
    with running(checkpoint, joins(daemon), fail_map=20) as engine:
        requests = [engine.request(prompt, OUTPUT) for prompt in prompts(range(10))]
        for request in requests:
            with pytest.raises(EngineError, match="EngineDeadError"):
                request.result(60)
        until("the daemon sees it", lambda: not daemon.get(NAME).connected)
        until("its memory is given back", lambda: engine.kv_bytes() == 0)
        assert engine.close()


@pytest.mark.parametrize("pages", [0, 2])
def test_an_engine_ends_while_a_limit_is_in_flight(
    checkpoint: Path, daemon: DaemonProcess, pages: int
) -> None:
    daemon.start()
    with running(checkpoint, joins(daemon)) as engine:
        engine.generate(prompts(range(10)), OUTPUT)
        for prompt in prompts(range(10, 14)):
            engine.request(prompt, 200)
        daemon.set(NAME, pages * PAGE_BYTES)
        engine.request(prompts([14])[0], OUTPUT)
        assert engine.close()
    until("the daemon sees it", lambda: not daemon.get(NAME).connected)
