import json

import pytest
from kvquota.kvctl import render
from kvquota.v1.quota_pb2 import Instance, Reason, Status
from rich.console import Console

BUSY = Instance(
    name="llama-70b/dp1",
    engine="vllm 0.32.0",
    pid=4711,
    connected=True,
    status=Status.STATUS_DEFERRED,
    reason=Reason.REASON_PINNED_BY_RUNNING_REQUESTS,
    detail="3 pages hold running requests.",
    revision=12,
    observed_revision=11,
    limit_bytes=3 << 29,
    effective_limit_bytes=3 << 29,
    page_bytes=2 << 20,
    capacity_bytes=8 << 30,
    mapped_bytes=5 << 30,
    pinned_bytes=1 << 30,
    draining_bytes=512 << 20,
    evictable_bytes=123456789,
    overage_bytes=7 << 29,
    set_by="kvctl",
    set_at_unix_ns=1796049875123456789,
    ranks=2,
    ranks_lost=1,
)
ZERO = Instance(
    name="a", engine="reference 1", connected=True, status=Status.STATUS_APPLIED, limit_bytes=0, revision=3
)
ABSENT = Instance(
    name="b", status=Status.STATUS_UNAVAILABLE, reason=Reason.REASON_NOT_CONNECTED, settled=True
)

WIDE = """\
NAME           ENGINE       STATUS       REASON                        LIMIT  MAPPED  PINNED   EVICTABLE  WARM  REVISION
llama-70b/dp1  vllm 0.32.0  deferred     pinned_by_running_requests  1.5 GiB   5 GiB   1 GiB  117.74 MiB     0        12
a              reference 1  applied      -                                 0       0       0           0     0         3
b              -            unavailable  not_connected                  none       0       0           0     0         0
"""  # noqa: E501
MEDIUM = """\
NAME           STATUS       REASON                        LIMIT  MAPPED   EVICTABLE  REVISION
llama-70b/dp1  deferred     pinned_by_running_requests  1.5 GiB   5 GiB  117.74 MiB        12
a              applied      -                                 0       0           0         3
b              unavailable  not_connected                  none       0           0         0
"""
NARROW = """\
NAME           STATUS       REASON                        LIMIT  MAPPED
llama-70b/dp1  deferred     pinned_by_running_requests  1.5 GiB   5 GiB
a              applied      -                                 0       0
b              unavailable  not_connected                  none       0
"""
FOLDED = """\
NAME           STATUS       REASON             LIMIT  MAPPED
llama-70b/dp1  deferred     pinned_by_runni  1.5 GiB   5 GiB
                            ng_requests
a              applied      -                      0       0
b              unavailable  not_connected       none       0
"""


def printed(instances: list[Instance], width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render.table(instances, width))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


@pytest.mark.parametrize(
    ("width", "golden"),
    [
        (100_000, WIDE),
        (120, WIDE),
        (119, None),
        (100, MEDIUM),
        (93, MEDIUM),
        (80, NARROW),
        (71, NARROW),
        (60, FOLDED),
    ],
)
def test_the_table_fits_its_width(width: int, golden: str | None) -> None:
    text = printed([BUSY, ZERO, ABSENT], width)
    assert max(map(len, text.splitlines())) <= width
    if golden is not None:
        assert text == golden


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_no_width_cuts_off_a_name_or_a_number(width: int) -> None:
    text = printed([BUSY], width)
    assert "…" not in text
    assert "1.5 GiB" in text
    first = [line[: text.index("STATUS")].strip() for line in text.splitlines()[1:]]
    assert "".join(first) == BUSY.name


def test_an_empty_table_has_its_heads() -> None:
    assert printed([], 120).split() == list(render.COLUMNS)


def test_the_values_of_json() -> None:
    value = render.as_dict(BUSY)
    assert value["status"] == "deferred"
    assert value["reason"] == "pinned_by_running_requests"
    assert value["set_at"] == "2026-11-30T14:44:35.123456Z"
    assert (value["limit_bytes"], value["pid"], value["ranks"]) == (3 << 29, 4711, 2)
    assert value["connected"] is True
    assert value["settled"] is False
    assert json.loads(render.to_json(value)) == value
    assert "\n" not in render.to_json(value, indent=None)


def test_what_is_not_there_is_null_and_zero_is_zero() -> None:
    absent, zero = render.as_dict(ABSENT), render.as_dict(ZERO)
    for key in ("pid", "limit_bytes", "effective_limit_bytes", "engine", "set_by", "set_at", "detail"):
        assert absent[key] is None, key
    assert (absent["reason"], absent["mapped_bytes"]) == ("not_connected", 0)
    assert (zero["limit_bytes"], zero["reason"]) == (0, None)


def test_every_field_of_the_message_has_its_key() -> None:
    fields = {field.name for field in Instance.DESCRIPTOR.fields}
    assert set(render.as_dict(BUSY)) == fields - {"set_at_unix_ns"} | {"set_at"}


def test_a_status_of_a_newer_daemon_shows_its_number() -> None:
    newer = Instance.FromString(b"\x28\x63")  # status 99
    assert render.as_dict(newer)["status"] == "99"
    assert "99" in render.line(newer)


def test_lines_and_cards() -> None:
    busy = "llama-70b/dp1: limit 1.5 GiB, mapped 5 GiB, revision 12: deferred, pinned_by_running_requests"
    assert render.line(BUSY) == busy
    assert render.outcome(BUSY) == f"{busy} (3 pages hold running requests)"
    assert render.change(BUSY) == f"{busy}; pinned 1 GiB, evictable 117.74 MiB, warm 0"
    assert render.change(ABSENT) == render.outcome(ABSENT) == render.line(ABSENT)
    assert render.line(ABSENT) == "b: limit none, revision 0: unavailable, not_connected, settled"
    assert render.line(ZERO) == "a: limit 0, mapped 0, revision 3: applied"
    assert render.change(ZERO) == "a: limit 0, mapped 0, revision 3: applied; pinned 0, evictable 0, warm 0"
    assert (
        render.card(BUSY)
        == """\
name          llama-70b/dp1
engine        vllm 0.32.0, pid 4711, ranks 2, 1 lost
status        deferred, pinned_by_running_requests (3 pages hold running requests)
limit         1.5 GiB
revision      12 (the engine is at 11)
set by        kvctl at 2026-11-30T14:44:35.123456Z
mapped        5 GiB of 8 GiB in pages of 2 MiB
  pinned      1 GiB (512 MiB draining)
  evictable   117.74 MiB
  warm        0
  retiring    0
  quarantined 0
overage       3.5 GiB
requests      0 waiting, 0 blocked"""
    )
    assert (
        render.card(ABSENT)
        == """\
name          b
engine        -
status        unavailable, not_connected, settled
limit         none
revision      0
set by        -"""
    )


def test_an_engine_can_not_write_to_the_terminal() -> None:
    hostile = Instance(name="a", engine="\x1b[2Jvllm\r\n[red]", detail="\x1b]0;x\x07", set_by="\u202e")
    for text in (printed([hostile], 200), render.card(hostile), render.outcome(hostile)):
        assert all(character.isprintable() for character in text.replace("\n", ""))
    assert "?[2Jvllm??[red]" in printed([hostile], 200)
