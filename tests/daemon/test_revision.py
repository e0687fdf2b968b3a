"""The revision table: every row of it, and joining again."""

import pytest
from kvquota.daemon.errors import ConflictError, InvalidRequestError, StaleError
from kvquota.daemon.revision import MAX_STEP, Joined, Told, join, revision_to_set
from kvquota.daemon.spec import MAX_REVISION, Spec

GIB = 1 << 30
NOW = Spec("a", limit_bytes=GIB, revision=7)


def test_without_a_number_the_next_one_is_taken() -> None:
    assert revision_to_set(Spec("a"), 5, None, None) == 1
    assert revision_to_set(NOW, GIB, None, None) == 8


def test_a_number_may_jump_ahead_by_at_most_2_to_the_32() -> None:
    assert revision_to_set(NOW, 5, 8, None) == 8
    assert revision_to_set(NOW, None, 7 + MAX_STEP, None) == 7 + MAX_STEP
    with pytest.raises(InvalidRequestError, match=str(8 + MAX_STEP)):
        revision_to_set(NOW, 5, 8 + MAX_STEP, None)


@pytest.mark.parametrize("number", [-1, -(2**63)])
def test_a_number_below_zero_is_none(number: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"revision {number}"):
        revision_to_set(NOW, 5, number, None)


def test_the_same_number_with_the_same_limit_changes_nothing() -> None:
    assert revision_to_set(NOW, GIB, 7, None) == 7
    assert revision_to_set(Spec("a", revision=7), None, 7, None) == 7


@pytest.mark.parametrize("limit", [0, None, GIB + 1])
def test_the_same_number_with_another_limit_is_a_conflict(limit: int | None) -> None:
    with pytest.raises(ConflictError, match="revision 7"):
        revision_to_set(NOW, limit, 7, None)


def test_no_limit_and_a_limit_of_zero_differ() -> None:
    with pytest.raises(ConflictError):
        revision_to_set(Spec("a", limit_bytes=0, revision=7), None, 7, None)


@pytest.mark.parametrize("number", [6, 1, 0])
def test_a_lower_number_is_stale_even_with_the_same_limit(number: int) -> None:
    with pytest.raises(StaleError, match=f"revision {number}"):
        revision_to_set(NOW, GIB, number, None)


def test_the_number_of_a_name_that_was_never_limited_is_zero() -> None:
    assert revision_to_set(Spec("a"), None, 0, None) == 0
    with pytest.raises(ConflictError, match="revision 0"):
        revision_to_set(Spec("a"), 5, 0, None)


def test_an_expectation_that_holds_takes_the_next_number() -> None:
    assert revision_to_set(NOW, 5, None, 7) == 8
    assert revision_to_set(Spec("a"), 5, None, 0) == 1


@pytest.mark.parametrize("expected", [6, 8, 0, -1])
def test_an_expectation_that_fails_is_a_conflict(expected: int) -> None:
    with pytest.raises(ConflictError, match=f"expected revision {expected}"):
        revision_to_set(NOW, 5, None, expected)


def test_both_numbers_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="give one"):
        revision_to_set(NOW, 5, 8, 7)


def test_numbers_end_with_an_error_and_not_with_an_overflow() -> None:
    last = Spec("a", revision=MAX_REVISION)
    with pytest.raises(InvalidRequestError):
        revision_to_set(last, 5, None, None)
    with pytest.raises(InvalidRequestError):
        revision_to_set(last, 5, MAX_REVISION + 1, None)


@pytest.mark.parametrize(
    ("spec", "told", "joined"),
    [
        # A new engine.
        (Spec("a"), Told(None, 0, None), Joined(0, None, "spec")),
        # A new engine under a default limit, which has no number.
        (Spec("a"), Told(None, 0, GIB), Joined(1, GIB, "agent")),
        # A spec made before the engine ever started.
        (Spec("a", GIB, 3), Told(None, 0, None), Joined(3, GIB, "spec")),
        (Spec("a", GIB, 3), Told(None, 0, 5), Joined(3, GIB, "spec")),
        # The engine ran without a daemon and was limited in its process.
        (Spec("a"), Told(None, 4, 5), Joined(4, 5, "agent")),
        # Daemon and engine were apart; nothing happened.
        (Spec("a", GIB, 7), Told(7, 7, GIB), Joined(7, GIB, "spec")),
        # ... the engine was limited in its process.
        (Spec("a", GIB, 7), Told(7, 9, 5), Joined(9, 5, "agent")),
        # ... the daemon was told something else.
        (Spec("a", GIB, 8), Told(7, 7, 5), Joined(8, GIB, "spec")),
        # ... both: the daemon's value stands, above both numbers.
        (Spec("a", GIB, 8), Told(7, 8, 5), Joined(9, GIB, "superseded_local")),
        (Spec("a", GIB, 8), Told(7, 12, 5), Joined(13, GIB, "superseded_local")),
        (Spec("a", None, 20), Told(7, 12, 5), Joined(21, None, "superseded_local")),
        # The daemon lost its disk, or has an old copy of it.
        (Spec("a"), Told(7, 7, 5), Joined(7, 5, "agent")),
        (Spec("a", GIB, 3), Told(7, 7, None), Joined(7, None, "agent")),
        # A spec exists, and the engine that never saw it was limited in its process.
        (Spec("a", GIB, 3), Told(None, 2, 5), Joined(4, GIB, "superseded_local")),
        # The same number cannot mean two limits.
        (Spec("a", GIB, 7), Told(7, 7, 5), Joined(8, GIB, "superseded_local")),
    ],
)
def test_joining_again(spec: Spec, told: Told, joined: Joined) -> None:
    assert join(spec, told) == joined


def test_numbers_never_go_back_and_change_whenever_the_limit_does() -> None:
    limits = (None, 0, GIB)
    for spec_revision in range(4):
        for base in (None, 0, 1, 2, 3):
            for revision in range(base or 0, 5):
                for ours, theirs in ((a, b) for a in limits for b in limits):
                    spec = Spec("a", ours if spec_revision else None, spec_revision)
                    joined = join(spec, Told(base, revision, theirs))
                    assert joined.revision >= max(spec.revision, revision)
                    if joined.limit_bytes != theirs:
                        assert joined.revision > revision, "the engine would not take it up"
                    if joined.limit_bytes != spec.limit_bytes:
                        assert joined.revision > spec.revision, "a number with two meanings"


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        (None, "none"),
        (0, "0"),
        (1000, "1000 B"),
        (512 << 20, "512 MiB"),
        (3 << 29, "1.5 GiB"),
        ((512 << 20) + 1, "536870913 B"),
        (2**63 - 1, f"{2**63 - 1} B"),
    ],
)
def test_a_conflict_shows_limits_as_people_write_them_and_never_two_alike(
    limit: int | None, shown: str
) -> None:
    with pytest.raises(ConflictError, match=f"with limit {shown}, not 7 MiB"):
        revision_to_set(Spec("a", limit_bytes=limit, revision=7), 7 << 20, 7, None)
