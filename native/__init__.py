"""Native memory."""

from kvquota.native._native import (
    Desired,
    DesiredReader,
    DesiredWriter,
    Observed,
    ObservedReader,
    ObservedWriter,
    SegmentError,
)

__all__ = [
    "Desired",
    "DesiredReader",
    "DesiredWriter",
    "Observed",
    "ObservedReader",
    "ObservedWriter",
    "SegmentError",
]
