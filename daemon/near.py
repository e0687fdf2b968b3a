"""Which known names one may have meant."""

import difflib
import heapq
from collections.abc import Iterable

_LOOKED_AT = 32
_END = 16


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to 3 of `known` that resemble `name`, the most alike first.

    Only those that begin and end most alike are compared closely: that takes long, and everyone waits for it.
    """
    likely = heapq.nlargest(_LOOKED_AT, known, key=lambda other: _ends_alike(name, other))
    return difflib.get_close_matches(name, likely, n=3)


def _ends_alike(one: str, other: str) -> int:
    """Letters that are the same at the beginning, and at the end."""
    return _same(one[:_END], other[:_END]) + _same(one[: -_END - 1 : -1], other[: -_END - 1 : -1])


def _same(one: str, other: str) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
