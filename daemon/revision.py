"""The order of what an instance is told. Pure: every rule about revisions is here, and nothing else is."""

from dataclasses import dataclass

from kvquota.daemon.errors import ConflictError, InvalidRequestError, StaleError
from kvquota.daemon.spec import MAX_REVISION, Spec

MAX_STEP = 2**32
"""The furthest that one call may move a revision."""
_UNITS = "KMGTPE"


def revision_to_set(spec: Spec, limit_bytes: int | None, revision: int | None, expected: int | None) -> int:
    """The revision at which to set `limit_bytes`; the current one when it is set so already.

    Raises InvalidRequestError, ConflictError or StaleError.
    """
    current = spec.revision
    if revision is not None and expected is not None:
        raise InvalidRequestError(
            f"revision {revision} and expected_revision {expected} are both given: give one of them"
        )
    if expected is not None and expected != current:
        raise ConflictError(
            f"{spec.name}: expected revision {expected}, it is {current}, limit {_show(spec.limit_bytes)}: "
            "look at it and set again"
        )
    if revision is None:
        if current >= MAX_REVISION:
            raise InvalidRequestError(f"{spec.name}: revision {current} is the last one there is")
        return current + 1
    if not 0 <= revision <= min(current + MAX_STEP, MAX_REVISION):
        raise InvalidRequestError(
            f"revision {revision}: expected one above the current {current} of {spec.name}, by at most 2^32"
        )
    if revision < current:
        raise StaleError(f"{spec.name}: revision {revision} is below the current {current}; nothing changed")
    if revision == current and limit_bytes != spec.limit_bytes:
        raise ConflictError(
            f"{spec.name}: revision {revision} is taken with limit {_show(spec.limit_bytes)}, "
            f"not {_show(limit_bytes)}; use a higher revision"
        )
    return revision


@dataclass(frozen=True)
class Told:
    """What a leader says it was told: the last daemon revision it saw (`base`), and what it acts on now."""

    base: int | None
    revision: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Joined:
    """An instance's limit after its leader joined. `origin`: `spec`, `agent` or `superseded_local`."""

    revision: int
    limit_bytes: int | None
    origin: str


def join(spec: Spec, told: Told) -> Joined:
    """Settle who is right after a time apart. A name without a spec has one of revision 0.

    Numbers never go back: the result is never below what either side has seen.
    """
    base = told.base or 0
    if spec.revision <= base:
        if spec.revision and told.revision == spec.revision and told.limit_bytes != spec.limit_bytes:
            # The same number with another limit: not a local change, which would have a number of its own.
            return Joined(spec.revision + 1, spec.limit_bytes, "superseded_local")
        # A default limit has no number yet, and the engine acts on nothing that is not above its last one.
        number = max(told.revision, 1 if told.limit_bytes is not None else 0)
        changed = (number, told.limit_bytes) != (spec.revision, spec.limit_bytes)
        return Joined(number, told.limit_bytes, "agent" if changed else "spec")
    if told.revision > base:
        return Joined(max(spec.revision, told.revision) + 1, spec.limit_bytes, "superseded_local")
    return Joined(spec.revision, spec.limit_bytes, "spec")


def _show(limit_bytes: int | None) -> str:
    """A limit for people, as kvctl shows it; where that would round, to the byte: two limits must differ."""
    if limit_bytes is None:
        return "none"
    unit = max(0, limit_bytes.bit_length() - 1) // 10
    hundredths, rest = divmod(limit_bytes * 100, 1 << 10 * unit)
    if unit == 0 or rest:
        return f"{limit_bytes} B" if limit_bytes else "0"
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + f" {_UNITS[unit - 1]}iB"
