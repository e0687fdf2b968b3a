import json
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from kvquota.kvctl.cli import main
from kvquota.v1.quota_pb2 import Instance, Reason, SetLimitRequest, SetLimitResponse, Status

KVCTL = str(Path(sys.executable).with_name("kvctl"))
NOW = Instance(name="a", status=Status.STATUS_APPLIED, revision=9, limit_bytes=1 << 30)
PINNED = Instance(
    name="a",
    status=Status.STATUS_DEFERRED,
    reason=Reason.REASON_PINNED_BY_RUNNING_REQUESTS,
    revision=9,
    limit_bytes=0,
)
FLOOR = Instance(
    name="a",
    status=Status.STATUS_DEFERRED,
    reason=Reason.REASON_FLOOR,
    settled=True,
    revision=9,
    limit_bytes=0,
)


def answer(quota: Any, instance: Instance, timed_out: bool = False) -> None:
    quota.on["SetLimit"] = lambda *_: SetLimitResponse(instance=instance, timed_out=timed_out)


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        (["1G"], SetLimitRequest(limit_bytes=1 << 30)),
        (["0"], SetLimitRequest(limit_bytes=0)),
        (["none"], SetLimitRequest()),
        (["1.5GiB", "--create"], SetLimitRequest(limit_bytes=3 << 29, create=True)),
        (["1", "--revision", "12"], SetLimitRequest(limit_bytes=1, revision=12)),
        (["1", "--expect", "0"], SetLimitRequest(limit_bytes=1, expected_revision=0)),
        (["1", "--wait"], SetLimitRequest(limit_bytes=1, wait=True, wait_timeout_ms=30_000)),
        (
            ["1", "--wait", "--timeout", "0.25"],
            SetLimitRequest(limit_bytes=1, wait=True, wait_timeout_ms=250),
        ),
    ],
)
def test_what_is_asked_for(quota: Any, arguments: list[str], request_: SetLimitRequest) -> None:
    answer(quota, NOW)
    assert main(["limit", "a", *arguments]) == 0
    request_.name, request_.set_by = "a", "kvctl"
    assert quota.requests == [request_]


def test_the_outcome_is_a_line_or_an_object(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer(quota, NOW)
    assert main(["limit", "a", "1G"]) == 0
    assert capsys.readouterr().out == "a: limit 1 GiB, revision 9: applied\n"
    assert main(["-o", "json", "limit", "a", "1G"]) == 0
    assert json.loads(capsys.readouterr().out)["revision"] == 9


def test_a_wait_that_ends_settled_but_not_applied_says_why(
    quota: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(quota, FLOOR)
    assert main(["limit", "a", "0", "--wait"]) == 0
    assert capsys.readouterr().out == "a: limit 0, revision 9: deferred, floor, settled\n"


def test_a_wait_that_ends_at_its_time_out(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer(quota, PINNED, timed_out=True)
    message = (
        "kvctl: set, but not settled after 2 s: `kvctl watch a` shows how it goes on; "
        "now a: limit 0, revision 9: deferred, pinned_by_running_requests\n"
    )
    assert main(["limit", "a", "0", "--wait", "--timeout", "2"]) == 5
    assert capsys.readouterr() == ("", message)
    assert main(["limit", "a", "0", "--wait", "--timeout", "2", "-o", "json"]) == 5
    out, err = capsys.readouterr()
    assert (json.loads(out)["reason"], err) == ("pinned_by_running_requests", message)


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_conflict_shows_the_current_state(
    quota: Any, capsys: pytest.CaptureFixture[str], code: grpc.StatusCode
) -> None:
    quota.refuse("SetLimit", code, "a: revision 8 is below the current 9", NOW)
    message = "kvctl: a: revision 8 is below the current 9; now a: limit 1 GiB, revision 9: applied\n"
    assert main(["limit", "a", "2G", "--revision", "8"]) == 4
    assert capsys.readouterr() == ("", message)
    assert main(["limit", "a", "2G", "--revision", "8", "-o", "json"]) == 4
    out, err = capsys.readouterr()
    assert (json.loads(out)["revision"], err) == (9, message)


def test_ctrl_c_ends_a_wait_and_not_the_limit(quota: Any) -> None:
    asked, over = Event(), Event()

    def wait(_: Any, context: grpc.ServicerContext) -> SetLimitResponse:
        context.add_callback(over.set)
        asked.set()
        over.wait(60)
        return SetLimitResponse()

    quota.on["SetLimit"] = wait
    command = [KVCTL, "limit", "a", "0", "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "kvctl: interrupted; what was sent to the daemon stands"


def test_a_conflict_without_a_state(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.refuse("SetLimit", grpc.StatusCode.ABORTED, "a: taken")
    assert main(["limit", "a", "2G", "-o", "json"]) == 4
    assert capsys.readouterr() == ("", "kvctl: a: taken\n")


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL]
)
def test_a_refused_limit(quota: Any, capsys: pytest.CaptureFixture[str], code: grpc.StatusCode) -> None:
    quota.refuse("SetLimit", code, "a: no")
    assert main(["limit", "a", "2G"]) == 1
    assert capsys.readouterr() == ("", "kvctl: a: no\n")


def test_an_unknown_name_says_how_to_make_it(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.refuse("SetLimit", grpc.StatusCode.NOT_FOUND, "no instance 'a'")
    assert main(["limit", "a", "2G"]) == 1
    assert (
        capsys.readouterr().err == "kvctl: no instance 'a' (--create keeps a limit for an engine to come)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["12Q"], "12Q"),
        (["-1"], "-1"),
        (["-512M"], "-512M"),
        ([""], "''"),
        (["9" * 30], "9" * 30),
        (["50%"], "50%"),
        (["1G", "2G"], "2G"),
        (["1G", "--revision", "x"], "x"),
        (["1G", "--revision", "-3"], "-3"),
        (["1G", "--expect", "9223372036854775808"], "--expect 9223372036854775808"),
        (["1G", "--revision", "1", "--expect", "2"], "--expect 2"),
        (["1G", "--wait", "--timeout", "nan"], "nan"),
        (["1G", "--wait", "--timeout", "inf"], "inf"),
        (["1G", "--wait", "--timeout", "-0.5"], "-0.5"),
        (["1G", "--timeout", "3"], "--timeout 3"),
        (["1G", "--waits"], "--waits"),
        ([], "SIZE|none"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_asked(
    quota: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], value: str
) -> None:
    assert main(["limit", "a", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert value in err
    assert err.endswith("limit --help)\n")
    assert quota.requests == []


def test_a_name_that_no_message_can_carry(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["limit", "a\udcff", "1G"], ["status", "a\n"], ["watch", "b", "a\udcff"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert quota.requests == []
