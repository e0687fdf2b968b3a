"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.daemon import DaemonProcess
    from tests.support.scene import Scene


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with small pages."""
    from tests.support.reference import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scene(daemon_process: "DaemonProcess", model: Path) -> "Iterator[Scene]":
    """A running daemon, and reference engines that a test starts."""
    from tests.support.scene import Scene

    scene = Scene(daemon_process, model)
    yield scene
    scene.close()
