"""Instances as people and programs read them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from kvquota.kvctl.sizes import format_limit, format_size

if TYPE_CHECKING:
    from kvquota.v1.quota_pb2 import Instance
    from rich.console import Console
    from rich.table import Table

_WORDS = ("NAME", "ENGINE", "STATUS", "REASON")
COLUMNS = (*_WORDS, "LIMIT", "MAPPED", "PINNED", "EVICTABLE", "WARM", "REVISION")

_LEFT_OUT = ("ENGINE", "WARM", "PINNED", "EVICTABLE", "REVISION")
_PARTS = ("mapped", "pinned", "evictable", "warm")
_GAP = "  "
_STYLES = {"applied": "green", "deferred": "yellow", "degraded": "red", "unavailable": "dim"}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_UNCUT = 100_000


def as_dict(instance: Instance) -> dict[str, Any]:
    """Every field of the message by its name; None for what is not there: no limit, no reason, nobody.

    Statuses and reasons are lower-case words, and `set_at` is ISO 8601 in UTC.
    """
    values: dict[str, Any] = {}
    for field in instance.DESCRIPTOR.fields:
        value = getattr(instance, field.name)
        if field.has_presence and not instance.HasField(field.name):
            value = None
        elif field.enum_type is not None:
            value = _word(instance, field.name)
        elif value == "":
            value = None
        if field.name == "set_at_unix_ns":
            values["set_at"] = _time(value)
        else:
            values[field.name] = value
    return values


def to_json(value: dict[str, Any] | list[dict[str, Any]], indent: int | None = 2) -> str:
    """JSON text; with `indent` None it is one line."""
    return json.dumps(value, indent=indent)


def line(instance: Instance) -> str:
    """The instance in one line: what was asked for and how far it is."""
    mapped = f", mapped {format_size(instance.mapped_bytes)}" if instance.connected else ""
    sizes = f"limit {_limit(instance)}{mapped}"
    return f"{_plain(instance.name)}: {sizes}, revision {instance.revision}: {_standing(instance)}"


def change(instance: Instance) -> str:
    """A line of `watch`: how far the instance is, and where its memory is."""
    if not instance.connected:
        return line(instance)
    parts = ", ".join(f"{part} {format_size(getattr(instance, f'{part}_bytes'))}" for part in _PARTS[1:])
    return f"{line(instance)}; {parts}"


def outcome(instance: Instance) -> str:
    """The line, with the reason in a sentence where there is one."""
    return line(instance) + _detail(instance)


def card(instance: Instance) -> str:
    """Everything that an operator asks about one instance, a line each."""
    lost = f", {instance.ranks_lost} lost" if instance.ranks_lost else ""
    behind = instance.connected and instance.observed_revision != instance.revision
    rows = {
        "name": _plain(instance.name),
        "engine": f"{_plain(instance.engine) or '-'}"
        + (f", pid {instance.pid}, ranks {instance.ranks}{lost}" if instance.connected else ""),
        "status": _standing(instance) + _detail(instance),
        "limit": _limit(instance),
        "revision": f"{instance.revision}"
        + (f" (the engine is at {instance.observed_revision})" if behind else ""),
        "set by": f"{_plain(instance.set_by)} at {_time(instance.set_at_unix_ns)}"
        if instance.set_by
        else "-",
    }
    if instance.connected:
        rows |= {
            "mapped": f"{format_size(instance.mapped_bytes)} of {format_size(instance.capacity_bytes)}"
            f" in pages of {format_size(instance.page_bytes)}",
            "  pinned": format_size(instance.pinned_bytes)
            + (f" ({format_size(instance.draining_bytes)} draining)" if instance.draining_bytes else ""),
            "  evictable": format_size(instance.evictable_bytes),
            "  warm": format_size(instance.warm_bytes),
            "  retiring": format_size(instance.retiring_bytes),
            "  quarantined": format_size(instance.quarantined_bytes),
            "overage": format_size(instance.overage_bytes),
            "requests": f"{instance.requests_waiting} waiting, {instance.requests_blocked} blocked",
        }
    if instance.stale:
        rows["report"] = "could not be read just now: these are its last good values"
    return "\n".join(f"{label:<14}{value}" for label, value in rows.items())


def table(instances: Iterable[Instance], width: int) -> Table:
    """A row an instance. A small `width` leaves out the columns of least weight; then long words fold."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [_row(instance) for instance in instances]
    heads = dict(zip(COLUMNS, COLUMNS, strict=True))
    widths = {column: max(cell_len(row[column]) for row in (heads, *rows)) for column in COLUMNS}
    for column in _LEFT_OUT:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) > width:
            del widths[column]
    grid = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0), header_style="bold")
    for column in widths:
        if column in _WORDS:
            grid.add_column(column, overflow="fold", no_wrap=column == "STATUS")
        else:
            grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        styles = {"STATUS": _STYLES.get(row["STATUS"], "")}
        grid.add_row(*(Text(row[column], styles.get(column, "")) for column in widths))
    return grid


def console() -> Console:
    """Where tables go: as wide as the terminal and in colour there; elsewhere plain, and never folded."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        color_system="auto" if terminal else None,
        force_terminal=terminal,
        width=None if terminal else _UNCUT,
        highlight=False,
        markup=False,
    )


def _row(instance: Instance) -> dict[str, str]:
    sizes = (format_size(getattr(instance, f"{part}_bytes")) for part in _PARTS)
    texts = (_plain(instance.name), _plain(instance.engine))
    words = (_word(instance, "status"), _word(instance, "reason"))
    cells = (*(cell or "-" for cell in (*texts, *words)), _limit(instance), *sizes, str(instance.revision))
    return dict(zip(COLUMNS, cells, strict=True))


def _standing(instance: Instance) -> str:
    words = [word for field in ("status", "reason") if (word := _word(instance, field))]
    if instance.settled and "applied" not in words:
        words.append("settled")
    return ", ".join(words)


def _detail(instance: Instance) -> str:
    return f" ({_plain(instance.detail).rstrip('.')})" if instance.detail else ""


def _limit(instance: Instance) -> str:
    return format_limit(instance.limit_bytes if instance.HasField("limit_bytes") else None)


def _word(instance: Instance, field: str) -> str | None:
    """The value's name without its prefix; None for "none"; its number where only the daemon knows it."""
    number = getattr(instance, field)
    kind = instance.DESCRIPTOR.fields_by_name[field].enum_type
    if kind is None or number not in kind.values_by_number:
        return str(number)
    word = kind.values_by_number[number].name.removeprefix(f"{field.upper()}_").lower()
    return None if word in {"none", "unspecified"} else word


def _time(unix_ns: int | None) -> str | None:
    if unix_ns is None:
        return None
    # Microseconds, in whole numbers: a float of this many nanoseconds is off by some.
    moment = _EPOCH + timedelta(microseconds=unix_ns // 1000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _plain(text: str) -> str:
    """Text that came from an engine, with nothing in it that a terminal acts on."""
    return "".join(character if character.isprintable() else "?" for character in text)
