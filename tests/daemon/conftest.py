"""Fixtures of the daemon's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    """One running daemon for a module's tests that leave nothing behind in it."""
    with tempfile.TemporaryDirectory(prefix="kvq") as path:
        daemon = DaemonProcess(Path(path))
        daemon.start()
        yield daemon
        daemon.kill()
