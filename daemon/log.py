"""One line for each decision, on stderr: an event's name, then key=value."""

import json
import logging
import sys

_log = logging.getLogger("kvquota.daemon")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/:+%")


def set_up() -> None:
    """Log to stderr from here on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)


def info(event: str, **fields: object) -> None:
    """Something that was asked for happened."""
    _log.info("%s", _line(event, fields))


def warning(event: str, **fields: object) -> None:
    """Something was refused, dropped or set aside."""
    _log.warning("%s", _line(event, fields))


def error(event: str, **fields: object) -> None:
    """Something failed that an operator should look at."""
    _log.error("%s", _line(event, fields))


def _line(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in fields.items())])


def _value(value: object) -> str:
    # Names and reasons come from outside: quoted, they can't forge a line or a field.
    text = "none" if value is None else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text)
