import os
import pty
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvquota.kvctl import client
from kvquota.kvctl.cli import main
from kvquota.v1.quota_pb2 import Instance, ListInstancesResponse, Status

KVCTL = str(Path(sys.executable).with_name("kvctl"))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("kvctl: ")
    return str(err)


def listing(quota: Any) -> None:
    quota.on["ListInstances"] = lambda *_: ListInstancesResponse(
        instances=[Instance(name="a" * 90, status=Status.STATUS_DEGRADED)]
    )


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], "command"),
        (["lst"], "lst"),
        (["list", "-o", "yaml"], "yaml"),
        (["list", "extra"], "extra"),
        (["status", "a", "b"], "b"),
        (["--daemon", "localhost:1", "list"], "localhost:1"),
        (["--daemon", "unix:", "list"], "unix:"),
        (["--daemon", "unix:a\udcff", "list"], "unix:a"),
        (["--daemon", f"unix:/{'x' * 107}", "list"], "too long for a socket"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], value: str) -> None:
    assert main(arguments) == 2
    assert value in one_line(capsys)


def test_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "control.sock"
    assert main(["--daemon", f"unix:{path}", "list"]) == 3
    assert f"no daemon at {path} (No such file or directory)" in one_line(capsys)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert main(["--daemon", f"unix://{path}", "list"]) == 3
    assert f"no daemon at {path} (Connection refused)" in one_line(capsys)


def test_the_path_is_taken_as_it_is(quota: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(quota)
    folder = quota.socket.parent.rename(quota.socket.parent.with_name("a b%41#?c"))
    for address in (f"unix:{folder}/control.sock", f"unix://{folder}/control.sock"):
        assert main(["--daemon", address, "list"]) == 0
    monkeypatch.chdir(folder)
    assert main(["--daemon", "unix:control.sock", "list"]) == 0


def test_a_socket_of_others(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.socket.chmod(0)
    user = os.geteuid()
    if user == 0:
        # Root may use every socket.
        os.seteuid(65534)
    try:
        assert main(["list"]) == 3
    finally:
        os.seteuid(user)
    assert "no permission" in one_line(capsys)


def test_who_may_not_use_the_control_socket_reads_by_the_other(
    quota: Any, short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing(quota)
    quota.on["GetInstance"] = lambda *_: Instance(name="a")
    short_dir.chmod(0o755)
    control = short_dir / "control.sock"
    quota.socket.chmod(0o666)
    (short_dir / "read.sock").hardlink_to(quota.socket)
    user = os.geteuid()
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(control))
        control.chmod(0)
        if user == 0:
            os.seteuid(65534)
        try:
            codes = [
                main(["--daemon", f"unix:{control}", *arguments])
                for arguments in (["list"], ["status", "a"], ["limit", "a", "1"])
            ]
        finally:
            os.seteuid(user)
    assert codes == [0, 0, 3]
    assert f"no permission to use {control}" in capsys.readouterr().err


def test_a_daemon_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DEADLINE_S", 0.2)
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert main(["--daemon", f"unix:{path}", "list"]) == 3
    assert str(path) in one_line(capsys)


def test_the_default_is_the_systems_daemon_or_else_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVQUOTA_DAEMON", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if os.path.exists("/run/kvquota/gpu0/control.sock"):
        pytest.skip("a daemon of the system is here")
    assert main(["list"]) == 3
    assert "/run/kvquota/gpu0/control.sock" in one_line(capsys)
    own = tmp_path / "kvquota" / "gpu0" / "control.sock"
    own.parent.mkdir(parents=True)
    own.touch()
    assert main(["list"]) == 3
    assert str(own) in one_line(capsys)


def test_an_error_that_can_not_be_written(quota: Any) -> None:
    quota.refuse("SetLimit", grpc.StatusCode.ABORTED, "taken", Instance(name="a"))
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [KVCTL, "-o", "json", "limit", "a", "1"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["list", "list -o json", "--help"])
def test_without_the_standard_streams_it_is_only_silent(quota: Any, arguments: str, closed: str) -> None:
    listing(quota)
    command = f"{KVCTL} {arguments} {closed}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_elsewhere_than_on_a_terminal_nothing_is_coloured_or_folded(quota: Any) -> None:
    listing(quota)
    environment = os.environ | {
        "FORCE_COLOR": "1",
        "CLICOLOR_FORCE": "1",
        "COLUMNS": "40",
        "TERM": "xterm-256color",
    }
    out = subprocess.run(
        [KVCTL, "list"], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "\x1b" not in out
    assert out.splitlines()[1].split()[:3] == ["a" * 90, "-", "degraded"]


def test_on_a_terminal_the_status_is_coloured(quota: Any) -> None:
    listing(quota)
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {
        "TERM": "xterm-256color"
    }
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        subprocess.run([KVCTL, "list"], env=environment, stdout=theirs, timeout=60, check=True)
        os.close(theirs)
        assert b"\x1b[31mdegraded" in terminal.read(65536)


def test_an_answer_that_can_not_be_written(quota: Any) -> None:
    listing(quota)
    with open("/dev/full", "w", encoding="utf-8") as full:
        for form in ("table", "json"):
            done = subprocess.run(
                [KVCTL, "list", "-o", form],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stderr) == (
                1,
                "kvctl: the answer can't be written: No space left on device\n",
            )


def test_help_and_mistakes_do_not_load_grpc() -> None:
    code = (
        "import sys; from kvquota.kvctl.cli import main; "
        "codes = [main(['--help']), main(['limit', 'a', '12Q'])];"
        "print(codes, sorted({'grpc', 'google.protobuf', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[-1] == "[0, 2] []"


def test_kvctl_loads_no_other_part_of_the_project() -> None:
    code = (
        "import sys; from kvquota.kvctl import cli, client;"
        "print(*sorted({name for name in sys.modules if name.startswith('kvquota.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    parts = {name.split(".")[1] for name in done.stdout.split()}
    assert parts == {"kvctl", "v1"}


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvctl, version ")
