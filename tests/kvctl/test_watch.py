import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from kvquota.kvctl.cli import main
from kvquota.v1.quota_pb2 import Instance, Status, WatchResponse

KVCTL = str(Path(sys.executable).with_name("kvctl"))


def instance(name: str, revision: int) -> Instance:
    return Instance(name=name, status=Status.STATUS_APPLIED, revision=revision)


def script(quota: Any, *responses: WatchResponse) -> None:
    quota.on["Watch"] = lambda *_: iter(responses)


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_changes_are_objects_or_lines(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script(
        quota,
        WatchResponse(snapshot=True, instances=[instance("a", 1), instance("b", 1)]),
        WatchResponse(instances=[instance("a", 2)]),
        WatchResponse(removed=["b"]),
    )
    assert main(["watch", "-o", "json", "a", "b"]) == 3
    assert [
        (value["name"], value.get("revision"), value.get("removed", False)) for value in objects(capsys)
    ] == [
        ("a", 1, False),
        ("b", 1, False),
        ("a", 2, False),
        ("b", None, True),
    ]
    assert list(quota.requests[0].names) == ["a", "b"]
    assert main(["watch"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1].split(";")[0] for line in lines] == [
        "a: limit none, revision 1: applied",
        "b: limit none, revision 1: applied",
        "a: limit none, revision 2: applied",
        "b: removed",
    ]


def test_a_fresh_snapshot_prints_what_it_changes(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script(
        quota,
        WatchResponse(snapshot=True, instances=[instance("a", 1), instance("b", 1), instance("c", 1)]),
        WatchResponse(snapshot=True, instances=[instance("b", 1), instance("c", 2)]),
    )
    assert main(["watch", "-o", "json"]) == 3
    changes = objects(capsys)[3:]
    assert changes[0] == {"name": "a", "removed": True}
    assert [(value["name"], value["revision"]) for value in changes[1:]] == [("c", 2)]


def test_a_name_that_is_not_there_yet_is_said_once(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script(
        quota,
        WatchResponse(snapshot=True, instances=[instance("a", 1)]),
        WatchResponse(instances=[instance("b", 1)]),
        WatchResponse(snapshot=True, instances=[instance("a", 1)]),
    )
    assert main(["watch", "a", "b", "-o", "json"]) == 3
    out, err = capsys.readouterr()
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["a", "b", "b"]
    assert err.splitlines()[0] == "kvctl: no instance 'b' yet: waiting for it"
    assert len(err.splitlines()) == 2


def test_an_unknown_name(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.refuse("Watch", grpc.StatusCode.NOT_FOUND, "no instance 'x'")
    assert main(["watch", "x"]) == 1
    assert capsys.readouterr().err == "kvctl: no instance 'x' (kvctl list shows all)\n"


@pytest.fixture
def watching(quota: Any) -> Iterator[subprocess.Popen[str]]:
    """A `kvctl watch` that has printed a first line and waits for the next."""
    over = Event()

    def forever(_: Any, context: grpc.ServicerContext) -> Iterator[WatchResponse]:
        context.add_callback(over.set)
        yield WatchResponse(snapshot=True, instances=[instance("a", 1)])
        over.wait(60)

    quota.on["Watch"] = forever
    with subprocess.Popen(
        [KVCTL, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "a: limit none" in process.stdout.readline()
        yield process
        process.kill()


def test_ctrl_c_ends_it_well(watching: subprocess.Popen[str]) -> None:
    watching.send_signal(signal.SIGINT)
    assert watching.communicate(timeout=30) == ("", "")
    assert watching.returncode == 0


def test_it_ends_with_its_daemon(quota: Any, watching: subprocess.Popen[str]) -> None:
    quota.stop()
    out, err = watching.communicate(timeout=30)
    assert (watching.returncode, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert str(quota.socket) in err


def test_it_ends_when_its_reader_has_seen_enough(quota: Any) -> None:
    quota.on["Watch"] = lambda *_: (WatchResponse(instances=[instance("a", n)]) for n in range(1, 10**9))
    with subprocess.Popen(
        [KVCTL, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "revision 1" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == ""
