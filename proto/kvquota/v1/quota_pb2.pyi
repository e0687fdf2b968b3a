from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_APPLIED: _ClassVar[Status]
    STATUS_DEFERRED: _ClassVar[Status]
    STATUS_DEGRADED: _ClassVar[Status]
    STATUS_UNAVAILABLE: _ClassVar[Status]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    REASON_NOT_CONNECTED: _ClassVar[Reason]
    REASON_WAITING_FOR_ENGINE: _ClassVar[Reason]
    REASON_SHRINKING: _ClassVar[Reason]
    REASON_PINNED_BY_RUNNING_REQUESTS: _ClassVar[Reason]
    REASON_WAITING_FOR_RANKS: _ClassVar[Reason]
    REASON_FLOOR: _ClassVar[Reason]
    REASON_ENGINE_NOT_STEPPING: _ClassVar[Reason]
    REASON_ENGINE_NOT_RESPONDING: _ClassVar[Reason]
    REASON_QUARANTINED_PAGES: _ClassVar[Reason]
    REASON_RANK_LOST: _ClassVar[Reason]
    REASON_RANK_FAILED: _ClassVar[Reason]
    REASON_SEGMENT_UNREADABLE: _ClassVar[Reason]
STATUS_UNSPECIFIED: Status
STATUS_APPLIED: Status
STATUS_DEFERRED: Status
STATUS_DEGRADED: Status
STATUS_UNAVAILABLE: Status
REASON_NONE: Reason
REASON_NOT_CONNECTED: Reason
REASON_WAITING_FOR_ENGINE: Reason
REASON_SHRINKING: Reason
REASON_PINNED_BY_RUNNING_REQUESTS: Reason
REASON_WAITING_FOR_RANKS: Reason
REASON_FLOOR: Reason
REASON_ENGINE_NOT_STEPPING: Reason
REASON_ENGINE_NOT_RESPONDING: Reason
REASON_QUARANTINED_PAGES: Reason
REASON_RANK_LOST: Reason
REASON_RANK_FAILED: Reason
REASON_SEGMENT_UNREADABLE: Reason

class Instance(_message.Message):
    __slots__ = ("name", "engine", "pid", "connected", "status", "reason", "detail", "settled", "revision", "observed_revision", "limit_bytes", "effective_limit_bytes", "page_bytes", "capacity_bytes", "target_bytes", "mapped_bytes", "pinned_bytes", "draining_bytes", "evictable_bytes", "warm_bytes", "retiring_bytes", "quarantined_bytes", "overage_bytes", "set_by", "set_at_unix_ns", "ranks", "ranks_lost", "requests_waiting", "requests_blocked", "pages_mapped_total", "pages_unmapped_total", "blocks_evicted_total", "allocations_refused_total", "stale", "decided_monotonic_ns", "applied_monotonic_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_REVISION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WARM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVERAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    SET_AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_LOST_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    PAGES_MAPPED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_UNMAPPED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: str
    pid: int
    connected: bool
    status: Status
    reason: Reason
    detail: str
    settled: bool
    revision: int
    observed_revision: int
    limit_bytes: int
    effective_limit_bytes: int
    page_bytes: int
    capacity_bytes: int
    target_bytes: int
    mapped_bytes: int
    pinned_bytes: int
    draining_bytes: int
    evictable_bytes: int
    warm_bytes: int
    retiring_bytes: int
    quarantined_bytes: int
    overage_bytes: int
    set_by: str
    set_at_unix_ns: int
    ranks: int
    ranks_lost: int
    requests_waiting: int
    requests_blocked: int
    pages_mapped_total: int
    pages_unmapped_total: int
    blocks_evicted_total: int
    allocations_refused_total: int
    stale: bool
    decided_monotonic_ns: int
    applied_monotonic_ns: int
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[str] = ..., pid: _Optional[int] = ..., connected: bool = ..., status: _Optional[_Union[Status, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., settled: bool = ..., revision: _Optional[int] = ..., observed_revision: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., effective_limit_bytes: _Optional[int] = ..., page_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., target_bytes: _Optional[int] = ..., mapped_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., draining_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., warm_bytes: _Optional[int] = ..., retiring_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., overage_bytes: _Optional[int] = ..., set_by: _Optional[str] = ..., set_at_unix_ns: _Optional[int] = ..., ranks: _Optional[int] = ..., ranks_lost: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., requests_blocked: _Optional[int] = ..., pages_mapped_total: _Optional[int] = ..., pages_unmapped_total: _Optional[int] = ..., blocks_evicted_total: _Optional[int] = ..., allocations_refused_total: _Optional[int] = ..., stale: bool = ..., decided_monotonic_ns: _Optional[int] = ..., applied_monotonic_ns: _Optional[int] = ...) -> None: ...

class ListInstancesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...

class GetInstanceRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class SetLimitRequest(_message.Message):
    __slots__ = ("name", "limit_bytes", "revision", "expected_revision", "create", "wait", "wait_timeout_ms", "set_by")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit_bytes: int
    revision: int
    expected_revision: int
    create: bool
    wait: bool
    wait_timeout_ms: int
    set_by: str
    def __init__(self, name: _Optional[str] = ..., limit_bytes: _Optional[int] = ..., revision: _Optional[int] = ..., expected_revision: _Optional[int] = ..., create: bool = ..., wait: bool = ..., wait_timeout_ms: _Optional[int] = ..., set_by: _Optional[str] = ...) -> None: ...

class SetLimitResponse(_message.Message):
    __slots__ = ("instance", "timed_out")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    instance: Instance
    timed_out: bool
    def __init__(self, instance: _Optional[_Union[Instance, _Mapping]] = ..., timed_out: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("snapshot", "instances", "removed")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: bool = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...
