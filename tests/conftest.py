"""Fixtures that several folders use."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.daemon import DaemonProcess


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvq") as path:
        yield Path(path)


@pytest.fixture
def daemon_process(short_dir: Path) -> "Iterator[DaemonProcess]":
    """A running daemon (host device, 1 GiB) that nothing survives."""
    # Here, because an engine's environment has no grpc.
    from tests.support.daemon import DaemonProcess

    daemon = DaemonProcess(short_dir)
    daemon.start()
    yield daemon
    if not daemon.process_ended():
        daemon.kill()
