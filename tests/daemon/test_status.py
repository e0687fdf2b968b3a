"""What is shown of an instance: honest about memory, and safe against any report."""

import random
from typing import Any

import pytest
from kvquota.daemon.spec import Spec
from kvquota.daemon.status import Report, view
from kvquota.native import Observed
from kvquota.native.status import Reason, Status
from kvquota.v1 import quota_pb2 as pb

from tests.support.daemon import PAGE, report

LIMITED = Spec("a", limit_bytes=20 * PAGE, revision=5, set_by="me", set_at_unix_ns=9)


def show(spec: Spec = LIMITED, *, fresh: bool = True, answered: bool = True, **fields: Any) -> pb.Instance:
    return view(spec, "fake 1.0", Report(77, report(spec.revision, **fields), fresh, answered))


def stands(instance: pb.Instance) -> tuple[str, str, bool]:
    status = pb.Status.Name(instance.status).removeprefix("STATUS_")
    return status, pb.Reason.Name(instance.reason).removeprefix("REASON_"), instance.settled


def test_the_native_and_the_public_lists_are_the_same() -> None:
    assert {reason.name for reason in Reason} == {name.removeprefix("REASON_") for name in pb.Reason.keys()}  # noqa: SIM118
    public = {name.removeprefix("STATUS_") for name in pb.Status.keys()}  # noqa: SIM118
    assert {status.name for status in Status} == public - {"UNSPECIFIED"}


@pytest.mark.parametrize("decided", [4, 5])
def test_an_engine_that_nothing_can_wake_waits_for_a_step(decided: int) -> None:
    """Both for a limit that it has not seen, and for what ranks said since its last step."""
    said = report(
        5,
        revision_decided=decided,
        revision_applied=4,
        status=Status.DEFERRED,
        reason=Reason.WAITING_FOR_RANKS,
    )
    instance = view(LIMITED, "", Report(77, said, fresh=True, answered=False, wakes=False))
    assert stands(instance) == ("DEFERRED", "ENGINE_NOT_STEPPING", False)


def test_an_absent_instance_shows_its_spec_and_no_memory() -> None:
    instance = view(LIMITED, "", None)
    assert stands(instance) == ("UNAVAILABLE", "NOT_CONNECTED", False)
    assert (instance.connected, instance.limit_bytes, instance.revision) == (False, 20 * PAGE, 5)
    assert (instance.set_by, instance.set_at_unix_ns) == ("me", 9)
    assert not instance.HasField("pid")
    assert not instance.HasField("effective_limit_bytes")
    assert instance.mapped_bytes == 0


def test_an_engine_that_has_applied_its_limit() -> None:
    instance = show()
    assert stands(instance) == ("APPLIED", "NONE", True)
    assert (instance.pid, instance.engine, instance.ranks) == (77, "fake 1.0", 1)
    assert (instance.mapped_bytes, instance.pinned_bytes) == (10 * PAGE, 4 * PAGE)
    assert (instance.evictable_bytes, instance.warm_bytes) == (5 * PAGE, PAGE)
    assert (instance.capacity_bytes, instance.effective_limit_bytes) == (100 * PAGE, 20 * PAGE)
    assert instance.overage_bytes == 0


def test_a_limit_of_zero_is_zero_and_none_is_none() -> None:
    zero = show(
        Spec("a", limit_bytes=0, revision=1), mapped_pages=0, pinned_pages=0, evictable_pages=0, warm_pages=0
    )
    assert zero.HasField("limit_bytes")
    assert (zero.limit_bytes, zero.effective_limit_bytes) == (0, 0)
    assert stands(zero) == ("APPLIED", "NONE", True)
    none = show(Spec("a", revision=1))
    assert not none.HasField("limit_bytes")
    assert none.effective_limit_bytes == 100 * PAGE


def test_a_limit_above_capacity_is_shown_as_requested_and_counts_as_capacity() -> None:
    instance = show(Spec("a", limit_bytes=2**62, revision=1))
    assert (instance.limit_bytes, instance.effective_limit_bytes) == (2**62, 100 * PAGE)


def test_never_limited_is_applied_even_while_the_engine_starts() -> None:
    assert stands(view(Spec("a"), "", Report(77, Observed(), True, True))) == ("APPLIED", "NONE", True)


def test_a_limited_engine_that_has_not_reported_is_waited_for() -> None:
    instance = view(LIMITED, "", Report(77, Observed(), True, True))
    assert stands(instance) == ("DEFERRED", "WAITING_FOR_ENGINE", False)
    assert not instance.HasField("effective_limit_bytes")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mapped_pages": 21}, ("DEFERRED", "SHRINKING", False)),
        ({"retiring_pages": 1, "warm_pages": 0}, ("DEFERRED", "WAITING_FOR_RANKS", False)),
        ({"revision_applied": 4}, ("DEFERRED", "SHRINKING", False)),
        ({"revision_decided": 4, "revision_applied": 4}, ("DEFERRED", "WAITING_FOR_ENGINE", False)),
        ({"ranks": 2, "ranks_lost": 1}, ("DEGRADED", "RANK_LOST", False)),
        ({"status": 0}, ("DEFERRED", "WAITING_FOR_ENGINE", False)),
    ],
)
def test_applied_is_not_shown_where_the_report_contradicts_it(
    fields: dict[str, Any], expected: tuple[str, str, bool]
) -> None:
    assert stands(show(**fields)) == expected


def test_pages_that_running_requests_hold_are_said_to_be_so() -> None:
    instance = show(
        mapped_pages=30, pinned_pages=30, evictable_pages=0, warm_pages=0, draining_pages=10,
        status=int(Status.DEFERRED), reason=int(Reason.PINNED_BY_RUNNING_REQUESTS), revision_applied=4,
    )  # fmt: skip
    assert stands(instance) == ("DEFERRED", "PINNED_BY_RUNNING_REQUESTS", False)
    assert (instance.overage_bytes, instance.draining_bytes) == (10 * PAGE, 10 * PAGE)
    assert instance.detail


def at_floor(**fields: Any) -> pb.Instance:
    books: dict[str, Any] = {
        "mapped_pages": 1, "pinned_pages": 1, "evictable_pages": 0, "warm_pages": 0, "floor_pages": 1,
        "status": int(Status.DEFERRED), "reason": int(Reason.FLOOR), "revision_applied": 4,
    }  # fmt: skip
    return show(Spec("a", limit_bytes=0, revision=5), **(books | fields))


def test_only_the_floor_left_is_settled() -> None:
    instance = at_floor()
    assert stands(instance) == ("DEFERRED", "FLOOR", True)
    assert (instance.limit_bytes, instance.overage_bytes) == (0, PAGE)


def test_the_floor_is_not_settled_while_more_is_mapped() -> None:
    assert not at_floor(mapped_pages=2).settled
    assert not at_floor(mapped_pages=2, retiring_pages=1).settled
    assert not at_floor(revision_decided=4).settled


def test_an_unanswered_ring_shows_until_the_limit_is_decided() -> None:
    undecided: dict[str, Any] = {"revision_decided": 4, "revision_applied": 4}
    assert stands(show(answered=False, **undecided))[1] == "ENGINE_NOT_RESPONDING"
    assert stands(show(answered=False)) == ("APPLIED", "NONE", True)


def test_an_engine_that_nothing_steps_says_so() -> None:
    fields: dict[str, Any] = {
        "revision_decided": 4,
        "revision_applied": 4,
        "status": 2,
        "reason": int(Reason.ENGINE_NOT_STEPPING),
    }
    assert stands(show(**fields)) == ("DEFERRED", "ENGINE_NOT_STEPPING", False)


def test_a_report_that_can_not_be_read_is_flagged_and_never_applied() -> None:
    instance = show(fresh=False)
    assert instance.stale
    assert stands(instance) == ("DEGRADED", "SEGMENT_UNREADABLE", False)
    assert instance.mapped_bytes == 10 * PAGE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_bytes", 2**45), ("capacity_pages", 2**60), ("mapped_pages", 101), ("mapped_pages", -1),
        ("pinned_pages", 101), ("evictable_pages", 2**62), ("draining_pages", 5),
        ("revision_decided", 6), ("revision_applied", 6), ("status", 9), ("reason", 99),
        ("ranks_lost", 2), ("floor_pages", 101), ("blocks_evicted", -1), ("page_bytes", -PAGE),
        ("requests_waiting", -(2**63)),
    ],
)  # fmt: skip
def test_nonsense_is_clamped_flagged_and_named(field: str, value: Any) -> None:
    instance = show(LIMITED, **{field: value})
    assert stands(instance) == ("DEGRADED", "SEGMENT_UNREADABLE", False)
    assert field in instance.detail
    assert "not plausible" in instance.detail
    assert 0 <= instance.overage_bytes <= instance.mapped_bytes


def test_parts_that_are_more_than_the_whole_count_as_mapped() -> None:
    instance = show(mapped_pages=10, pinned_pages=24)
    assert instance.mapped_bytes == 30 * PAGE
    assert stands(instance) == ("DEFERRED", "SHRINKING", False)


def test_no_report_at_all_can_break_the_view() -> None:
    generator = random.Random(1)
    edges = [0, 1, 2, 5, 2**31, 2**62, 2**63 - 1, -1, -(2**63)]
    names = [name for name in dir(Observed()) if not name.startswith("_") and name != "limit_bytes"]
    for _ in range(2000):
        observed = Observed()
        for name in names:
            setattr(observed, name, generator.choice(edges))
        instance = view(LIMITED, "", Report(77, observed, True, True))
        for field in instance.DESCRIPTOR.fields:
            if field.name.endswith(("_bytes", "_total", "revision")) or field.name in {
                "ranks",
                "requests_waiting",
            }:
                assert getattr(instance, field.name) >= 0, field.name
        assert instance.overage_bytes <= instance.mapped_bytes <= instance.capacity_bytes
        if instance.status == pb.STATUS_APPLIED:
            assert instance.mapped_bytes <= instance.effective_limit_bytes
