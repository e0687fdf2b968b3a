import ctypes
import fcntl
import gc
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from kvquota.native import (
    Desired,
    DesiredReader,
    DesiredWriter,
    Observed,
    ObservedReader,
    ObservedWriter,
    SegmentError,
)

SIZE = 4096
SEQUENCE = 64  # bytes into the segment, where its lock lies
STATIC_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
F_SEAL_FUTURE_WRITE = 0x10
FORGERY = b"x" * 64

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.madvise.argtypes = LIBC.mprotect.argtypes
LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

OBSERVED_FIELDS = [
    "revision_decided", "revision_applied", "decided_at_ns", "applied_at_ns", "status", "reason",
    "page_bytes", "capacity_pages", "floor_pages", "target_pages", "mapped_pages", "pinned_pages",
    "draining_pages", "evictable_pages", "warm_pages", "retiring_pages", "quarantined_pages", "credits",
    "limit_bytes",
    "pages_mapped", "pages_unmapped", "blocks_evicted", "passes", "refused", "blocked_ns", "requests_waiting",
    "requests_blocked", "step", "ranks", "ranks_lost",
]  # fmt: skip


@pytest.fixture
def desired() -> Iterator[DesiredWriter]:
    writer = DesiredWriter()
    yield writer
    writer.close()


@pytest.fixture
def observed() -> Iterator[ObservedReader]:
    reader = ObservedReader()
    yield reader
    reader.close()


def fields(value: Desired | Observed, names: list[str]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}


def forged(content: bytes, seals: int = STATIC_SEALS | F_SEAL_FUTURE_WRITE) -> tuple[int, mmap.mmap]:
    """A memfd with this content, and a mapping through which it can be changed at any time."""
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    view = mmap.mmap(fd, len(content))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, view


def content(fd: int) -> bytes:
    return os.pread(fd, SIZE, 0)


def test_what_the_daemon_writes_is_what_the_leader_reads(desired: DesiredWriter) -> None:
    reader = DesiredReader(desired.fileno())
    told = {
        "revision": 2**40, "limit_bytes": 3 << 30, "guarantee_bytes": 1 << 30, "headroom_bytes": 5,
        "cache_bytes": 6, "preempt": True, "reclaim_sequence": 7, "reclaim_bytes": 8,
    }  # fmt: skip
    desired.write(Desired(**told))  # type: ignore[arg-type]
    read, fresh = reader.read()
    assert (fields(read, list(told)), fresh) == (told, True)


@pytest.mark.parametrize("amount", [None, 0, 1, 2**63 - 1])
def test_a_limit_of_zero_is_not_no_limit(desired: DesiredWriter, amount: int | None) -> None:
    reader = DesiredReader(desired.fileno())
    desired.write(Desired(limit_bytes=amount, cache_bytes=amount))
    read, _ = reader.read()
    assert (read.limit_bytes, read.cache_bytes) == (amount, amount)
    read.limit_bytes = None
    read.cache_bytes = 0
    assert (read.limit_bytes, read.cache_bytes) == (None, 0)


def test_a_new_segment_says_no_limit(desired: DesiredWriter) -> None:
    read, fresh = DesiredReader(desired.fileno()).read()
    assert (read.revision, read.limit_bytes, read.preempt, fresh) == (0, None, False, True)


def test_changed_is_true_from_a_write_to_the_read(desired: DesiredWriter) -> None:
    reader = DesiredReader(desired.fileno())
    assert reader.changed()
    reader.read()
    assert not reader.changed()
    desired.write(Desired(revision=1))
    assert reader.changed()
    assert reader.changed()
    reader.read()
    assert not reader.changed()


def test_what_the_leader_writes_is_what_the_daemon_reads(observed: ObservedReader) -> None:
    writer = ObservedWriter(observed.fileno())
    told = {name: 1000 + number for number, name in enumerate(OBSERVED_FIELDS)}
    value = Observed()
    for name, number in told.items():
        setattr(value, name, number)
    writer.write(value)
    read, fresh = observed.read()
    assert (fields(read, OBSERVED_FIELDS), fresh) == (told, True)


def test_every_field_of_observed_is_tested() -> None:
    assert sorted(OBSERVED_FIELDS) == sorted(name for name in dir(Observed) if not name.startswith("_"))


def test_a_pulse_counts_a_step_and_sets_the_usage_only(observed: ObservedReader) -> None:
    writer = ObservedWriter(observed.fileno())
    value = Observed()
    value.revision_applied = 9
    value.limit_bytes = 0
    writer.write(value)
    writer.pulse(pinned=1, evictable=2, warm=3, draining=4)
    writer.pulse(5, 6, 7, 8)
    read, _ = observed.read()
    usage = ["pinned_pages", "evictable_pages", "warm_pages", "draining_pages"]
    assert list(fields(read, usage).values()) == [5, 6, 7, 8]
    assert (read.step, read.revision_applied, read.limit_bytes) == (2, 9, 0)
    writer.write(value)
    assert observed.read()[0].step == 2


def test_nonsense_in_a_segment_is_read_as_it_is(observed: ObservedReader) -> None:
    with mmap.mmap(observed.fileno(), SIZE) as view:
        view[128:] = b"\xff" * (SIZE - 128)
        read, fresh = observed.read()
    assert (read.mapped_pages, read.status, read.limit_bytes, fresh) == (-1, -1, -1, True)


@pytest.mark.parametrize("sequence", [-1, 1, 2**63 - 1])
def test_a_lock_left_odd_keeps_the_last_snapshot(observed: ObservedReader, sequence: int) -> None:
    writer = ObservedWriter(observed.fileno())
    writer.pulse(1, 2, 3, 4)
    assert observed.read()[0].pinned_pages == 1
    with mmap.mmap(observed.fileno(), SIZE) as view:
        struct.pack_into("<q", view, 128 + 16, 77)
        struct.pack_into("<q", view, SEQUENCE, sequence)
        read, fresh = observed.read()
        assert (read.pinned_pages, fresh) == (1, False)
        struct.pack_into("<q", view, SEQUENCE, 2)
        read, fresh = observed.read()
        assert (read.pinned_pages, fresh) == (77, True)


def test_a_leader_asks_again_only_when_an_odd_lock_moves(desired: DesiredWriter) -> None:
    desired.write(Desired(revision=5))
    fd, view = forged(content(desired.fileno()))
    reader = DesiredReader(fd)
    assert reader.read()[0].revision == 5
    struct.pack_into("<q", view, SEQUENCE, 7)
    assert reader.changed()
    assert reader.read()[1] is False
    assert not reader.changed()
    struct.pack_into("<q", view, SEQUENCE, 8)
    assert reader.changed()
    assert reader.read()[1] is True
    os.close(fd)


def test_a_writer_repairs_a_lock_that_a_dead_one_left_odd(observed: ObservedReader) -> None:
    with mmap.mmap(observed.fileno(), SIZE) as view:
        struct.pack_into("<q", view, SEQUENCE, 41)
    assert observed.read()[1] is False
    ObservedWriter(observed.fileno()).pulse(1, 2, 3, 4)
    read, fresh = observed.read()
    assert (read.pinned_pages, fresh) == (1, True)


def stop_in_the_middle(fd: int, cpu: int) -> None:
    """A leader on the reader's own CPU, which loses it while its lock is odd."""
    os.sched_setaffinity(0, {cpu})
    with mmap.mmap(fd, SIZE) as view:
        for sequence in itertools.count(0, 2):
            struct.pack_into("<q", view, SEQUENCE, sequence + 1)
            os.sched_yield()
            struct.pack_into("<q", view, SEQUENCE, sequence + 2)
            for _ in range(1000):
                pass


def test_a_writer_that_lost_the_cpu_in_a_write_gets_it_to_end_it(observed: ObservedReader) -> None:
    mine = os.sched_getaffinity(0)
    cpu = min(mine)
    process = get_context("fork").Process(target=stop_in_the_middle, args=(observed.fileno(), cpu))
    process.start()
    os.sched_setaffinity(0, {cpu})
    try:
        torn = 0
        for _ in range(200):
            os.sched_yield()
            torn += not observed.read()[1]
    finally:
        os.sched_setaffinity(0, mine)
        process.kill()
        process.join(30)
    # Most of the time: another process may have the CPU for longer than a read waits.
    assert torn < 100


def write_without_pause(fd: int, stop: Event) -> None:
    writer = ObservedWriter(fd)
    value = Observed()
    number = 0
    while not stop.is_set():
        number += 1
        for name in OBSERVED_FIELDS:
            if name != "step":
                setattr(value, name, number)
        for _ in range(200):
            writer.write(value)


def test_a_snapshot_is_one_instant(observed: ObservedReader) -> None:
    context = get_context("fork")
    stop = context.Event()
    process = context.Process(target=write_without_pause, args=(observed.fileno(), stop), daemon=True)
    process.start()
    seen: set[int] = set()
    try:
        while len(seen) < 50:
            assert process.is_alive()
            read, _ = observed.read()
            numbers = {getattr(read, name) for name in OBSERVED_FIELDS if name not in ("step", "limit_bytes")}
            assert len(numbers) == 1
            seen |= numbers
    finally:
        stop.set()
        process.join(30)
    assert process.exitcode == 0


def seals_of(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)


def test_the_seals(desired: DesiredWriter, observed: ObservedReader) -> None:
    assert seals_of(desired.fileno()) == STATIC_SEALS | F_SEAL_FUTURE_WRITE
    assert seals_of(observed.fileno()) == STATIC_SEALS
    for fd in (desired.fileno(), observed.fileno()):
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, SIZE * 2)


def map_for_reading(fd: int) -> int:
    address = LIBC.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    assert address != ctypes.c_void_p(-1).value
    return int(address)


def check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def map_for_writing(fd: int) -> None:
    mmap.mmap(fd, SIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def map_then_protect(fd: int) -> None:
    check(LIBC.mprotect(map_for_reading(fd), SIZE, mmap.PROT_READ | mmap.PROT_WRITE))


def map_then_remove(fd: int) -> None:
    check(LIBC.madvise(map_for_reading(fd), SIZE, mmap.MADV_REMOVE))


def map_then_force(fd: int) -> None:
    address = map_for_reading(fd)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), FORGERY, address + 128)


def write(fd: int) -> None:
    os.pwrite(fd, FORGERY, 128)


def punch(fd: int) -> None:
    keep_size, punch_hole = 1, 2
    check(LIBC.fallocate(fd, keep_size | punch_hole, 0, SIZE))


def truncate(fd: int) -> None:
    os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC)


def copy(fd: int) -> None:
    with open("/proc/self/exe", "rb") as source:
        os.sendfile(fd, source.fileno(), 0, 64)


def reopened(attempt: Callable[[int], None]) -> Callable[[int], None]:
    def on_a_new_descriptor(fd: int) -> None:
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as again:
            attempt(again.fileno())

    on_a_new_descriptor.__name__ = f"reopened_{attempt.__name__}"
    return on_a_new_descriptor


ATTEMPTS = [map_for_writing, map_then_protect, map_then_remove, map_then_force, write, punch, truncate, copy]


@pytest.mark.parametrize(
    "attempt", [*ATTEMPTS, *map(reopened, ATTEMPTS)], ids=lambda attempt: str(attempt.__name__)
)
def test_an_agent_cannot_write_its_own_limit(
    desired: DesiredWriter, observed: ObservedReader, attempt: Callable[[int], None]
) -> None:
    desired.write(Desired(revision=3, limit_bytes=4))
    passed = os.dup(desired.fileno())
    before = content(passed)
    with pytest.raises(OSError):  # noqa: PT011 - EPERM, EACCES or EFAULT: each way has its own
        attempt(passed)
    assert content(passed) == before
    desired.write(Desired(revision=4, limit_bytes=5))
    assert DesiredReader(passed).read()[0].limit_bytes == 5
    os.close(passed)


@pytest.mark.parametrize("attempt", [map_for_writing, write, reopened(write)])
def test_the_attempts_work_where_nothing_is_sealed(
    observed: ObservedReader, attempt: Callable[[int], None]
) -> None:
    attempt(observed.fileno())


def test_a_private_mapping_changes_a_copy_only(desired: DesiredWriter) -> None:
    desired.write(Desired(limit_bytes=4))
    with mmap.mmap(desired.fileno(), SIZE, flags=mmap.MAP_PRIVATE) as view:
        view[128:] = b"\xff" * (SIZE - 128)
    assert DesiredReader(desired.fileno()).read()[0].limit_bytes == 4


def refuse(open_segment: Callable[[int], object], fd: int, why: str) -> None:
    with pytest.raises(SegmentError, match=f"descriptor {fd} is no .* segment: .*{why}"):
        open_segment(fd)


@pytest.mark.parametrize("open_segment", [DesiredReader, ObservedWriter])
def test_a_descriptor_that_is_no_segment(tmp_path: Path, open_segment: Callable[[int], object]) -> None:
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"x" * SIZE)
        refuse(open_segment, file.fileno(), "no seals")
    first, second = os.pipe()
    refuse(open_segment, first, "no seals")
    os.close(first)
    os.close(second)
    refuse(open_segment, first, "Bad file descriptor")
    refuse(open_segment, -1, "Bad file descriptor")


def test_one_segment_for_the_other(desired: DesiredWriter, observed: ObservedReader) -> None:
    refuse(DesiredReader, observed.fileno(), "seals are 7, expected 23")
    refuse(ObservedWriter, desired.fileno(), "sealed against writing")


def damaged(content: bytes, offset: int, word: int) -> bytes:
    return content[:offset] + struct.pack("<I", word) + content[offset + 4 :]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content[:-1], "size is 4095, expected 4096"),
        (lambda content: content + b"x", "size is 4097, expected 4096"),
        (lambda content: damaged(content, 0, 0), "magic"),
        (lambda content: damaged(content, 8, 2), "version is 2 .* expected 1 .*same kvquota"),
        (lambda content: damaged(content, 12, 8192), "declared size 8192"),
    ],
)
def test_a_segment_with_a_wrong_header(
    desired: DesiredWriter, change: Callable[[bytes], bytes], why: str
) -> None:
    fd, _ = forged(change(content(desired.fileno())))
    refuse(DesiredReader, fd, why)
    os.close(fd)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, F_SEAL_FUTURE_WRITE])
def test_a_segment_that_lacks_a_seal(desired: DesiredWriter, missing: int) -> None:
    fd, _ = forged(content(desired.fileno()), (STATIC_SEALS | F_SEAL_FUTURE_WRITE) & ~missing)
    refuse(DesiredReader, fd, "seals")
    os.close(fd)


def test_the_descriptor_stays_the_callers_and_may_be_closed(
    desired: DesiredWriter, observed: ObservedReader
) -> None:
    passed, returned = os.dup(desired.fileno()), os.dup(observed.fileno())
    reader, writer = DesiredReader(passed), ObservedWriter(returned)
    os.close(passed)
    os.close(returned)
    desired.write(Desired(revision=2))
    assert reader.read()[0].revision == 2
    writer.pulse(1, 2, 3, 4)
    assert observed.read()[0].step == 1


def test_closed_ends_say_so_and_keep_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    desired, observed = DesiredWriter(), ObservedReader()
    reader, writer = DesiredReader(desired.fileno()), ObservedWriter(observed.fileno())
    uses: list[Callable[[], object]] = [
        lambda: desired.write(Desired()), desired.fileno, reader.read, reader.changed, observed.read,
        observed.fileno, lambda: writer.write(Observed()), lambda: writer.pulse(1, 2, 3, 4),
    ]  # fmt: skip
    for end in (desired, observed, reader, writer, desired, observed, reader, writer):
        end.close()
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    assert set(os.listdir("/proc/self/fd")) == before


def test_segments_vanish_with_their_objects() -> None:
    def names() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvquota-" in line]

    gc.collect()
    before = names()
    desired, observed = DesiredWriter(), ObservedReader()
    assert len(names()) == len(before) + 2
    del desired, observed
    assert names() == before
