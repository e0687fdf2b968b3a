"""What an operator wants for one instance, and its JSON form."""

import json
import re
from dataclasses import asdict, dataclass, fields
from urllib.parse import quote

INT64_MAX = 2**63 - 1
MAX_REVISION = 2**62
"""The highest that one may ask for, far below an int64's end: `max(both) + 1` is always a number."""
MAX_SET_BY = 128
FORMAT = 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_MAX_FILE_STEM = 240
_MAX_SHOWN = 200


def name_problem(name: str) -> str | None:
    """Why `name` can't be an instance's; None when it can."""
    if not _NAME.fullmatch(name) or ".." in name:
        return (
            f"instance name {shorten(name)}: expected 1 to 128 letters, digits and . _ / -, "
            "the first a letter or a digit, without '..'"
        )
    if len(file_stem(name)) > _MAX_FILE_STEM:
        return f"instance name {name!r}: too many '/' for a file name of {_MAX_FILE_STEM} characters"
    return None


def shorten(name: str) -> str:
    """What was given as a name, quoted: a gRPC status has no room for any length."""
    return repr(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}...")


def file_stem(name: str) -> str:
    """The name as a file name, without its ending."""
    return quote(name, safe="")


@dataclass(frozen=True)
class Spec:
    """The wanted state of one instance. Bytes are counted on this daemon's device; None for no limit."""

    name: str
    limit_bytes: int | None = None
    revision: int = 0
    guarantee_bytes: int = 0
    weight: int = 1
    cache_bytes: int | None = None
    set_by: str = ""
    set_at_unix_ns: int | None = None

    def to_json(self) -> str:
        """The form that `from_json` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "Spec":
        """The spec in `text`. Raises ValueError, naming the field, for what `to_json` did not write."""
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("not a spec: nested too deeply") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a spec of format {FORMAT}")
        expected = {"format", *(field.name for field in fields(Spec))}
        if data.keys() != expected:
            raise ValueError(f"fields that differ from format {FORMAT}: {sorted(data.keys() ^ expected)}")
        name = data["name"]
        if not isinstance(name, str):
            raise ValueError(f"name is {name!r}, expected a string")
        if problem := name_problem(name):
            raise ValueError(problem)
        set_by = data["set_by"]
        if not isinstance(set_by, str) or len(set_by) > MAX_SET_BY:
            raise ValueError(f"set_by is {set_by!r}, expected a string of at most {MAX_SET_BY} characters")
        return Spec(
            name=name,
            limit_bytes=_optional(data, "limit_bytes", INT64_MAX),
            revision=_number(data, "revision", INT64_MAX),
            guarantee_bytes=_number(data, "guarantee_bytes", INT64_MAX),
            weight=_number(data, "weight", INT64_MAX),
            cache_bytes=_optional(data, "cache_bytes", INT64_MAX),
            set_by=set_by,
            set_at_unix_ns=_optional(data, "set_at_unix_ns", INT64_MAX),
        )


def _number(data: dict[str, object], key: str, most: int) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{key} is {value!r}, expected a whole number from 0 to {most}")
    return value


def _optional(data: dict[str, object], key: str, most: int) -> int | None:
    return None if data[key] is None else _number(data, key, most)
