"""Types of the native extension. Bytes are ints, pages and blocks are indices, seq and revisions grow."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

class DriverError(RuntimeError):
    """A driver call that failed.

    `operation` (name in the driver table), `code`, `name` (CUDA's, or errno's), `page` or None.
    """

    operation: str
    code: int
    name: str
    page: int | None

class OutOfMemoryError(DriverError):
    """`mem_create` found no memory left on the device. Fewer credits, never a crash."""

class ArenaInUseError(BufferError):
    """`Arena.close` while tensors over the arena are alive: nothing was closed."""

class SegmentError(ValueError):
    """A file descriptor that is no quota segment.

    Wrong size, magic, version or seals; the message names what and what was expected.
    """

class Driver:
    """The driver table (DESIGN.md section 7).

    One contract, several implementations; every call may raise DriverError.
    """

    @property
    def granularity(self) -> int: ...
    def mem_get_info(self) -> tuple[int, int]: ...
    def address_reserve(self, size: int) -> int: ...
    def address_free(self, address: int, size: int) -> None: ...
    def mem_create(self, size: int) -> int: ...
    def mem_release(self, handle: int) -> None: ...
    def mem_map(self, address: int, size: int, handle: int) -> None: ...
    def mem_unmap(self, address: int, size: int) -> None: ...
    def mem_set_access(self, address: int, size: int) -> None: ...
    def event_record(self) -> int: ...
    def event_query(self, event: int) -> bool: ...
    def event_synchronize(self, event: int) -> None: ...
    def event_destroy(self, event: int) -> None: ...

@final
class HostDriver(Driver):
    """memfd granules over PROT_NONE reservations.

    `fill`: byte written over a granule when it is mapped (tests use 0xFF).
    """

    def __init__(self, *, granularity: int = 2 << 20, fill: int | None = None) -> None: ...
    def attach(self, record_fd: int) -> None:
        """Take memory against this device record, what is taken already included.

        `record_fd` stays the caller's. ValueError when it is no device record.
        """
    def fileno(self) -> int:
        """The memfd behind all granules."""

@final
class CudaDriver(Driver):
    """CUDA's virtual memory on one device, in its primary context. See kvquota.agent.cuda.open_driver.

    `functions`: addresses by CUDA's names. It takes over one reference to the primary context, and drops it
    when the last of driver, arenas and tensors over them is gone.
    """

    def __init__(
        self, functions: Mapping[str, int], *, device: int, context: int, granularity: int
    ) -> None: ...
    stream: int
    """The handle of the stream whose work may touch pages: fences go behind it. 0: the default stream."""

@final
class FaultDriver(Driver):
    """Passes calls to `inner`, counts them, and fails the ones it was told to. For tests."""

    def __init__(self, inner: Driver) -> None: ...
    def fail(
        self, operation: str, nth: int = 1, times: int = 1, code: int = 5, name: str = "EIO"
    ) -> None: ...
    def calls(self, operation: str) -> int: ...

@final
class DeviceRecord:
    """Capacity and use of a host device, shared by the processes that take memory from it.

    What a dead process took is settled by whoever takes or looks next.
    """

    @staticmethod
    def create(capacity_bytes: int) -> DeviceRecord: ...
    @staticmethod
    def open(fd: int) -> DeviceRecord:
        """`fd` stays the caller's. ValueError when it is no device record."""
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class Fault:
    """A failed driver call that nothing has made good: command `seq`, `page` (-1: a credit's), and its error.

    That of a page stands until the page's memory is released, another until the same call succeeds.
    """

    seq: int
    page: int
    operation: str
    code: int
    name: str

@final
class ArenaReport:
    """One instant of an arena. Counts are pages; all but the last two are cumulative since its start.

    `done` is the last seq whose unmaps ended. Every credit asked for is one of: to be created, refused,
    dropped, or kept. A drop takes first those to be created, then refused ones (`refused` falls by them),
    then held ones. Those dropped before they were made count as created too, so that credits held = created
    - mapped - dropped, always. `quarantined_credits` are dropped ones of which memory could not be released.
    `held_bytes` is all physical memory, quarantined pages and credits included. `faults` are those that
    stand: the newest of each page and operation.
    """

    done: int
    created: int
    refused: int
    dropped: int
    mapped: int
    unmapped: int
    quarantined_credits: int
    held_bytes: int
    faults: list[Fault]

@final
class Arena:
    """Page p backs `strides[t]` bytes at offset `offsets[t] + p * strides[t]` of every tensor t.

    It is mapped whole or not at all. Bad arguments, and every call on a closed arena, raise ValueError and
    change nothing.
    """

    def __init__(self, driver: Driver, strides: Sequence[int], pages: int) -> None: ...
    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def offsets(self) -> list[int]: ...
    def ask(self, asked: int, dropped: int) -> None:
        """Want `asked` credits in all, of which `dropped` are given back.

        Both are cumulative: a lower number than before is an old message and changes nothing.
        """
    def apply(self, seq: int, maps: Sequence[int], unmaps: Sequence[int]) -> None:
        """Map now, and unmap behind the work submitted so far.

        A DriverError names the page that could not be mapped. The command counts all the same: its unmaps
        are on their way, and its maps are all without memory behind their addresses. They count as mapped,
        and hold their memory, until a command unmaps them; `faults` has each.
        """
    def wait_credits(self, count: int, timeout: float) -> int:
        """Return `created` once it is `count`, nothing more is to come, or `timeout` seconds passed."""
    def report(self) -> ArenaReport: ...
    def fileno(self) -> int:
        """An eventfd that is readable since the report changed. Its reader drains it; `report` does not."""
    def dlpack(
        self,
        offset: int,
        shape: Sequence[int],
        type_code: int,
        type_bits: int,
        strides: Sequence[int] | None = None,
    ) -> Any:
        """A DLPack capsule (`dltensor`) over part of the range.

        It keeps the arena alive, and from being closed. `offset` in bytes; `strides` in elements, row-major
        when None.
        """
    def close(self) -> None:
        """Wait for queued unmaps, then give back memory and addresses. May be called twice.

        Raises ArenaInUseError while tensors are alive, and the first DriverError after trying everything:
        then another call tries again what is left.
        """

@final
class PageQueue:
    """A block free list that is also balloon, occupancy and victim index. See native/include/page_queue.h.

    `blocks`: of one class, with `block_id` and `ref_cnt` in its __slots__; `blocks[i].block_id == i`.
    `pages[p]` = (first, end) of the blocks of page p. A block is withheld, used or free. A withheld block
    looks like one that a request holds: the queue sets its `ref_cnt` to 1, and to 0 when it comes into
    circulation; from there on the engine counts. ValueError names a block or page that a call does not fit
    (a double free, a used block removed), and then nothing has changed.
    """

    def __init__(self, blocks: Sequence[Any], pages: Sequence[tuple[int, int]]) -> None: ...
    # The interface of vLLM's FreeKVCacheBlockQueue.
    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be handed out now, those of growable pages included."""

    def popleft(self) -> Any: ...
    def popleft_n(self, n: int, /) -> list[Any]: ...
    def remove(self, block: Any, /) -> None: ...
    def append(self, block: Any, /) -> None: ...
    def append_n(self, blocks: Sequence[Any], /) -> None: ...
    def prepend_n(self, blocks: Sequence[Any], /) -> None: ...
    def get_all_free_blocks(self) -> list[Any]:
        """Free blocks in circulation, in the order in which they would be handed out.

        Not those of draining pages, which hold nothing of the prefix cache.
        """

    def iter_blocks_after(self, cursor: Any | None, /) -> Iterator[Any]:
        """As get_all_free_blocks, from behind `cursor`; ends at once where that is not free.

        Where `cursor` came to lie in a draining page it begins again.
        """
    # The balloon's side.
    for_running: bool
    """Whether the next blocks are for requests that run already: they may have those of draining pages."""

    def allow(self, pages: int, /) -> None:
        """At most `pages` more may be grown from now on."""

    def put(self, page: int, /) -> None:
        """Put a page in circulation that no allowed credit stands for."""

    def grown(self) -> list[int]:
        """Pages grown since the last call."""

    def victims(self, count: int, /) -> list[int]:
        """Up to `count` pages with no used block: empty ones, then the longest unused with cached blocks."""

    def take(self, page: int, /) -> list[Any]:
        """Withhold a page's blocks. Returns those that were freed by append or append_n.

        The page is not grown again before it is given: every rank must be done with it first.
        """

    def give(self, page: int, /) -> None: ...
    def drain(self, count: int, keep: Sequence[int] = ()) -> list[int]:
        """Make exactly `count` pinned pages draining (fewer where there are no more).

        Those that drain already come first, then the emptiest; after all others, those of `keep`. Returns the
        new ones: their blocks must lose their hashes, and the free ones are uncached. A page whose last used
        block is freed drains no more.
        """

    def uncache_all(self) -> None:
        """Take every free block for uncached: what the prefix cache knew of them is gone."""

    def is_draining(self, block: Any, /) -> bool: ...
    def usage(self) -> tuple[int, int, int, int]:
        """Pages in circulation: pinned, evictable, empty, draining (a part of pinned)."""

    def used_blocks(self, page: int, /) -> int: ...
    def in_circulation(self, page: int, /) -> bool: ...
    @property
    def num_used_blocks(self) -> int: ...
    @property
    def num_uncached_blocks(self) -> int:
        """Free blocks, those of growable pages included, that can be handed out without evicting anything."""

    @property
    def max_free_blocks(self) -> int:
        """Free blocks there would be with every page in circulation."""

    def check(self) -> None:
        """Walk everything. AssertionError where the books do not add up.

        Nor may a withheld block's `ref_cnt` be other than 1, or a free block's other than 0.
        """

@final
class Desired:
    """What the daemon wants. `limit_bytes`, `cache_bytes`: None for no limit."""

    def __init__(
        self,
        *,
        revision: int = 0,
        limit_bytes: int | None = None,
        guarantee_bytes: int = 0,
        headroom_bytes: int = 0,
        cache_bytes: int | None = None,
        preempt: bool = False,
        reclaim_sequence: int = 0,
        reclaim_bytes: int = 0,
    ) -> None: ...
    revision: int
    limit_bytes: int | None
    guarantee_bytes: int
    headroom_bytes: int
    cache_bytes: int | None
    preempt: bool
    reclaim_sequence: int
    reclaim_bytes: int

@final
class Observed:
    """What the leader did.

    Pages, except where the name says bytes, ns (CLOCK_MONOTONIC) or is a count of events.
    """

    def __init__(self) -> None: ...
    revision_decided: int
    revision_applied: int
    decided_at_ns: int
    applied_at_ns: int
    status: int
    reason: int
    page_bytes: int
    capacity_pages: int
    floor_pages: int
    target_pages: int
    mapped_pages: int
    pinned_pages: int
    draining_pages: int
    evictable_pages: int
    warm_pages: int
    retiring_pages: int
    quarantined_pages: int
    credits: int
    limit_bytes: int | None
    pages_mapped: int
    pages_unmapped: int
    blocks_evicted: int
    passes: int
    refused: int
    blocked_ns: int
    requests_waiting: int
    requests_blocked: int
    step: int
    ranks: int
    ranks_lost: int

@final
class DesiredWriter:
    """The daemon's end of a `desired` segment."""

    def __init__(self) -> None: ...
    def write(self, desired: Desired) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...

@final
class DesiredReader:
    """The leader's end of a `desired` segment.

    Mapped for reading only. The descriptor is the caller's to close.
    """

    def __init__(self, fd: int) -> None: ...
    def changed(self) -> bool: ...
    def read(self) -> tuple[Desired, bool]: ...
    def close(self) -> None: ...

@final
class ObservedWriter:
    """The leader's end of an `observed` segment."""

    def __init__(self, fd: int) -> None: ...
    def write(self, observed: Observed) -> None: ...
    def pulse(self, pinned: int, evictable: int, warm: int, draining: int) -> None: ...
    def close(self) -> None: ...

@final
class ObservedReader:
    """The daemon's end of an `observed` segment: makes the memfd, maps it for reading."""

    def __init__(self) -> None: ...
    def read(self) -> tuple[Observed, bool]: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...
