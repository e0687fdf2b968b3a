"""The closed lists of statuses and reasons that an `observed` segment carries as numbers."""

from enum import IntEnum


class Status(IntEnum):
    """Where an instance stands with its limit."""

    UNAVAILABLE = 0
    APPLIED = 1
    DEFERRED = 2
    DEGRADED = 3


class Reason(IntEnum):
    """Why an instance is not `applied`."""

    NONE = 0
    NOT_CONNECTED = 1
    WAITING_FOR_ENGINE = 2
    SHRINKING = 3
    PINNED_BY_RUNNING_REQUESTS = 4
    WAITING_FOR_RANKS = 5
    FLOOR = 6
    ENGINE_NOT_STEPPING = 7
    ENGINE_NOT_RESPONDING = 8
    QUARANTINED_PAGES = 9
    RANK_LOST = 10
    RANK_FAILED = 11
    SEGMENT_UNREADABLE = 12
