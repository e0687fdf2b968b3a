import json
from typing import Any

import grpc
import pytest
from kvquota.kvctl.cli import main
from kvquota.v1.quota_pb2 import Instance, ListInstancesResponse, Status

LIMITED = Instance(name="a", status=Status.STATUS_APPLIED, limit_bytes=0, revision=7)
FREE = Instance(name="b", status=Status.STATUS_APPLIED)


def test_list_is_a_table_or_an_array(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.on["ListInstances"] = lambda *_: ListInstancesResponse(instances=[LIMITED, FREE])
    for command in (["list"], ["status"]):
        assert main(command) == 0
        heads, *rows = capsys.readouterr().out.splitlines()
        assert heads.split()[0] == "NAME"
        assert [row.split() for row in rows] == [
            ["a", "-", "applied", "-", "0", "0", "0", "0", "0", "7"],
            ["b", "-", "applied", "-", "none", "0", "0", "0", "0", "0"],
        ]
        assert main([*command, "-o", "json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert [(value["name"], value["limit_bytes"]) for value in values] == [("a", 0), ("b", None)]


def test_nothing_to_list(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.on["ListInstances"] = lambda *_: ListInstancesResponse()
    assert main(["-o", "json", "list"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("NAME")


def test_status_of_one(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.on["GetInstance"] = lambda *_: LIMITED
    assert main(["status", "a"]) == 0
    assert "limit         0\n" in capsys.readouterr().out
    assert main(["-o", "json", "status", "a"]) == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == 0
    assert [request.name for request in quota.requests] == ["a", "a"]


def test_the_form_may_be_named_before_or_after_the_command(
    quota: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    quota.on["GetInstance"] = lambda *_: LIMITED
    for arguments in (["-o", "json", "status", "a"], ["status", "a", "--output", "json"]):
        assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "a"
    assert main(["-o", "json", "status", "a", "-o", "table"]) == 0
    assert capsys.readouterr().out.startswith("name")


def test_an_unknown_name(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.refuse("GetInstance", grpc.StatusCode.NOT_FOUND, "no instance 'lama':\n did you mean 'llama'?")
    assert main(["status", "lama"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kvctl: no instance 'lama': did you mean 'llama'? (kvctl list shows all)\n"


def test_a_daemon_that_breaks(quota: Any, capsys: pytest.CaptureFixture[str]) -> None:
    quota.refuse("ListInstances", grpc.StatusCode.INTERNAL, "it broke")
    assert main(["list"]) == 1
    assert capsys.readouterr().err == "kvctl: it broke\n"
