"""The processes of a session, and what they hold of ours, as the kernel shows it."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_MAPPED = re.compile(r" (\d+) +/memfd:kvquota-")
_ADDRESS = re.compile(r" (\d+) (@kvquota/\S+)$", re.MULTILINE)
_OURS = "/memfd:kvquota-"


def pids_of(session: int) -> list[int]:
    """Every process of `session` that runs; one that has ended does not, also where nobody has reaped it."""
    return [pid for pid in all_pids() if _session(pid) == session]


def all_pids() -> list[int]:
    """Every process that this one can see."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def granule_bytes(pids: Iterable[int]) -> int:
    """Physical bytes behind the KV cache: what the memfds of our granules hold."""
    found = {}
    for status, target in _memfds(pids):
        if target.startswith(f"{_OURS}granules"):
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def memfd_inodes(pids: Iterable[int]) -> set[int]:
    """Our memfds that `pids` have open or mapped."""
    found = {status.st_ino for status, _ in _memfds(pids)}
    for pid in pids:
        with suppress(OSError):
            found.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    return found


def abstract_addresses(pids: Iterable[int] | None = None) -> set[str]:
    """Abstract addresses of ours at which `pids` (None: any process) have a Unix socket."""
    found = {address: inode for inode, address in _ADDRESS.findall(Path("/proc/net/unix").read_text())}
    if pids is None:
        return set(found)
    theirs = {target for pid in pids for _, target in _descriptors(pid)}
    return {address for address, inode in found.items() if f"socket:[{inode}]" in theirs}


def _memfds(pids: Iterable[int]) -> Iterator[tuple[os.stat_result, str]]:
    for pid in pids:
        for link, target in _descriptors(pid):
            if target.startswith(_OURS):
                with suppress(OSError):
                    yield link.stat(), target


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            yield link, os.readlink(link)


def _session(pid: int) -> int | None:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state == "Z" else int(session)
