"""Sizes as people write them, to whole bytes and back. Every suffix is binary: 1K is 1024."""

import re
from fractions import Fraction

MAX_BYTES = 2**63 - 1

_UNITS = "KMGTPE"
_SIZE = re.compile(r"(?P<number>[0-9]{1,40}(\.[0-9]{1,40})?) ?((?P<unit>[KMGTPE])(i|B|iB)?|B)?", re.I | re.A)


def parse_limit(text: str) -> int | None:
    """Bytes of a size, or None for the word `none`. Raises ValueError as `parse_size` does."""
    return None if text.lower() == "none" else parse_size(text)


def parse_size(text: str) -> int:
    """Bytes of `512M`, `1.5GiB`, `2g` or `1048576`; what a fraction leaves below one byte is dropped.

    Raises ValueError that names `text` and says what to write.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no size: write bytes, a number with a binary suffix (512M, 2G, 1.5GiB), or none"
        )
    number, unit = Fraction(match["number"]), match["unit"]
    if unit is None and number.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of bytes: write one, or a suffix (1.5G)")
    size = int(number * 1024 ** (1 + _UNITS.index(unit.upper()) if unit else 0))
    if size > MAX_BYTES:
        raise ValueError(f"{text!r} is more than {MAX_BYTES} bytes: write less, or none for no limit")
    if size == 0 and number:
        # 0 means to take all memory away: it is never reached by rounding.
        raise ValueError(f"{text!r} is less than a byte: write 0 if that is what you mean")
    return size


def format_size(size: int) -> str:
    """The size for people: `1.5 GiB`, at most two decimals, rounded to the nearest; 0 is `0`."""
    if size < 1024:
        return f"{size} B" if size else "0"
    unit = min((size.bit_length() - 1) // 10, len(_UNITS))
    hundredths = _hundredths(size, unit)
    if hundredths >= 1024_00 and unit < len(_UNITS):
        unit += 1
        hundredths = _hundredths(size, unit)
    whole, rest = divmod(hundredths, 100)
    return f"{whole}.{rest:02}".rstrip("0").rstrip(".") + f" {_UNITS[unit - 1]}iB"


def format_limit(limit: int | None) -> str:
    """A limit for people: a size, or `none`."""
    return "none" if limit is None else format_size(limit)


def _hundredths(size: int, unit: int) -> int:
    scale = 1 << 10 * unit
    return (size * 100 + scale // 2) // scale
