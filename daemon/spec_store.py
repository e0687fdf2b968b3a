"""Specs on disk: one file for each instance, whole or not there at all."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvquota.daemon import log
from kvquota.daemon.errors import StorageError, StorageFullError
from kvquota.daemon.spec import Spec, file_stem

_KEPT = "%old.tmp"
"""The spec that is being replaced. No spec's own file: there, what follows a % are digits."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SpecStore:
    """The specs in one folder, which the caller has made and locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> dict[str, Spec]:
        """Every spec, by name. A file that is no spec is set aside and reported, and stops nothing.

        Raises OSError for one that can't be read: it may hold a limit that is in force.
        """
        specs = {}
        for path in sorted(self._folder.glob("*.tmp")):
            # A write that a crash cut short: the spec it was to replace is whole.
            path.unlink()
        for path in sorted(self._folder.glob("*.json")):
            spec = self._read(path)
            if spec is not None:
                specs[spec.name] = spec
        return specs

    def write(self, spec: Spec) -> None:
        """Make `spec` durable. Raises StorageFullError or StorageError, and then the old one still stands."""
        path = self._folder / f"{file_stem(spec.name)}.json"
        temporary = path.with_suffix(".tmp")
        kept = self._folder / _KEPT
        try:
            with _open_folder(self._folder) as folder:
                _write_file(temporary, spec.to_json().encode())
                kept.unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.link(path, kept)
                temporary.rename(path)
                try:
                    os.fsync(folder)
                except OSError:
                    _put_back(kept, path)
                    raise
        except OSError as problem:
            what = f"spec of {spec.name!r} not written to {path}: {problem.strerror}"
            if problem.errno in _FULL:
                raise StorageFullError(f"{what}; make room and set the limit again") from problem
            raise StorageError(what) from problem
        finally:
            # What stays is removed at the next start; a first problem is the one to tell.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
                kept.unlink(missing_ok=True)

    def _read(self, path: Path) -> Spec | None:
        try:
            spec = Spec.from_json(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            self._set_aside(path, problem)
            return None
        if path.name != f"{file_stem(spec.name)}.json":
            self._set_aside(path, ValueError(f"it holds the spec of {spec.name!r}"))
            return None
        return spec

    def _set_aside(self, path: Path, problem: Exception) -> None:
        aside = path.with_suffix(".corrupt")
        try:
            path.rename(aside)
        except OSError as failure:
            log.error("spec_unreadable", file=path, reason=problem, left_in_place=failure.strerror)
        else:
            log.error("spec_set_aside", file=path, moved_to=aside, reason=problem)


def _put_back(kept: Path, path: Path) -> None:
    try:
        if kept.exists():
            kept.rename(path)
        else:
            path.unlink()
    except OSError as failure:
        log.error("spec_not_put_back", file=path, reason=failure)


def _write_file(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        while content:
            content = content[os.write(fd, content) :]
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Opened before anything is written: with no descriptor left, the old spec must still stand."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
