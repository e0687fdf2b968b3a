"""The real `vllm serve` with KVQUOTA=1 alone: limits, clients that hang up, signals to its process group."""

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvquota.native import DeviceRecord
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import DaemonProcess, FakeAgent, until
from tests.support.session import abstract_addresses, all_pids, memfd_inodes
from tests.support.vllm_pages import OUTPUT, PAGE_BYTES, model, prompt, prompts
from tests.support.vllm_server import Server, server

pytestmark = pytest.mark.vllm

NAME = "served"
BLOCKS = 12 * 16
NUMBERS = range(10)
# What vLLM itself leaves behind where it is killed, and partly where it is not: sockets and rendezvous files.
STOCK_FILE = re.compile(r"(vllm_dist_)?[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the server answers without kvquota; it then ends with status 0 on a signal."""
    with server(checkpoint, {}, tmp_path_factory.mktemp("stock"), BLOCKS) as stock:
        tokens = stock.generate(prompts(NUMBERS), OUTPUT)
        assert "kvquota" not in stock.log
        stock.signal(signal.SIGTERM)
        assert stock.exit_status() == 0
    return tokens


@pytest.fixture
def daemon(daemon_process: DaemonProcess) -> Iterator[DaemonProcess]:
    yield daemon_process
    assert daemon_process.stop() == 0


def joins(daemon: DaemonProcess) -> Mapping[str, str]:
    return {
        **daemon.environment(NAME),
        "KVQUOTA_HOST_FILL": "255",
        "KVQUOTA_RESERVE_BYTES": str(4 * PAGE_BYTES),
    }


@contextmanager
def serving(checkpoint: Path, daemon: DaemonProcess, folder: Path, **options: bool) -> Iterator[Server]:
    with server(checkpoint, joins(daemon), folder, BLOCKS, **options) as running:
        yield running


def device_bytes(daemon: DaemonProcess) -> int:
    """What processes have taken from the daemon's device."""
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if "kvquota-device-record" in str(link.readlink()):
            with link.open("r+b", buffering=0) as file:
                record = DeviceRecord.open(file.fileno())
                try:
                    return record.used_bytes
                finally:
                    record.close()
    raise AssertionError("the daemon has no device record")


def healthy(running: Server) -> bool:
    return [running.get(path) for path in ("/health", "/v1/models")] == [200, 200]


def limit_0_and_back(running: Server, daemon: DaemonProcess, expected: list[list[int]]) -> None:
    assert running.generate(prompts(NUMBERS), OUTPUT) == expected
    held = daemon.set(NAME, 0, wait=True).instance
    assert (held.status, held.reason) == (pb.STATUS_DEFERRED, pb.REASON_FLOOR)
    assert running.kv_bytes() <= PAGE_BYTES

    requests = [running.request(prompt(n), OUTPUT, stream=n % 2 == 0) for n in NUMBERS]
    until("the requests are held", lambda: daemon.get(NAME).requests_blocked == len(NUMBERS))
    assert healthy(running)
    assert not any(request.answered() for request in requests)
    assert running.kv_bytes() <= PAGE_BYTES

    daemon.set(NAME, 6 * PAGE_BYTES)
    assert [request.tokens() for request in requests] == expected
    assert healthy(running)
    assert running.kv_bytes() <= 6 * PAGE_BYTES


def test_requests_wait_under_limit_0_and_clients_that_hang_up_are_forgotten(
    checkpoint: Path, daemon: DaemonProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with serving(checkpoint, daemon, tmp_path) as running:
        started = f"kvquota: instance {NAME}: 12 pages of {PAGE_BYTES} bytes, limit none, with the daemon at "
        assert running.log.count(f"{started}{daemon.agent_socket}\n") == 1
        limit_0_and_back(running, daemon, expected)

        daemon.kill()
        until("the loss is logged", lambda: "kvquota: lost the daemon" in running.log)
        daemon.start()
        until("the daemon is found", lambda: "kvquota: found the daemon" in running.log)
        assert running.generate(prompts(NUMBERS), OUTPUT) == expected
        assert running.log.count("the daemon at") == 3

        daemon.set(NAME, 0, wait=True)
        requests = [running.request(prompt(n), OUTPUT, stream=n % 2 == 0) for n in range(4)]
        until("the requests are held", lambda: daemon.get(NAME).requests_waiting == 4)
        for gone in requests[:2]:
            gone.leave()
        until("they are forgotten", lambda: daemon.get(NAME).requests_waiting == 2)
        assert healthy(running)
        for gone in requests[2:]:
            gone.leave()
        until("nothing waits", lambda: daemon.get(NAME).requests_waiting == 0)
        assert running.kv_bytes() <= PAGE_BYTES

        # One that hangs up while it runs leaves its pages to be given back.
        daemon.set(NAME, None, wait=True)
        runs = running.request(prompt(0), 2000, stream=True)
        until("it has tokens", runs.answered)
        daemon.set(NAME, 0)
        until("its page drains", lambda: daemon.get(NAME).draining_bytes > 0)
        runs.leave()
        until("the limit is settled", lambda: daemon.get(NAME).settled)
        assert running.kv_bytes() <= PAGE_BYTES
        daemon.set(NAME, None)
        assert running.generate(prompts(NUMBERS), OUTPUT) == expected


@pytest.mark.parametrize("loaded", [False, True], ids=["at rest", "under load"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_process_group_leaves_nothing(
    checkpoint: Path,
    daemon: DaemonProcess,
    tmp_path: Path,
    expected: list[list[int]],
    number: signal.Signals,
    loaded: bool,
) -> None:
    files = sorted(daemon.runtime_dir.iterdir())
    with serving(checkpoint, daemon, tmp_path) as running:
        mine = abstract_addresses(running.pids())
        assert mine
        assert running.generate(prompts(range(8)), OUTPUT) == expected[:8]
        requests = []
        if loaded:
            requests = [running.request(prompt(n), 1000, stream=n % 2 == 0) for n in range(4)]
            until("they run", lambda: daemon.get(NAME).pinned_bytes > 2 * PAGE_BYTES)
            daemon.set(NAME, 0)
            requests.append(running.request(prompt(4), OUTPUT))
        granules = memfd_inodes(running.pids())
        assert granules
        assert device_bytes(daemon) >= PAGE_BYTES

        running.signal(number)
        for request in requests:
            # The server waits for its clients to hang up, with kvquota and without.
            request.leave()
        status = running.exit_status()
        assert status == (-number if number == signal.SIGKILL else 0), running.log
        until("every process is gone", lambda: running.pids() == [])
        until("the daemon sees it", lambda: not daemon.get(NAME).connected)

        until("no address is left", lambda: not mine & abstract_addresses())
        until("its memfds are gone", lambda: not granules & memfd_inodes(set(all_pids()) - {daemon.pid}))
        assert device_bytes(daemon) == 0
        assert sorted(daemon.runtime_dir.iterdir()) == files
        assert [path for path in running.left_files() if not STOCK_FILE.fullmatch(path.name)] == []
        assert [path for path in Path("/dev/shm").iterdir() if "kvquota" in path.name] == []
    with FakeAgent(daemon.agent_socket) as next_one:
        assert next_one.hello(NAME)["kind"] == "welcome"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_untouched_command(
    checkpoint: Path, daemon: DaemonProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    """It spawns its processes: a start of 25 seconds."""
    with serving(checkpoint, daemon, tmp_path, forked=False) as running:
        limit_0_and_back(running, daemon, expected)
        running.signal(signal.SIGTERM)
        assert running.exit_status() == 0
        until("every process is gone", lambda: running.pids() == [])
