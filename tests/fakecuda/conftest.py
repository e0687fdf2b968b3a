from collections.abc import Iterator

import pytest

from tests.fakecuda.api import Driver, declare
from tests.fakecuda.control import FakeCuda, load


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """The stand-in on a machine with two devices of 64 MiB, before cuInit."""
    fake = load()
    declare(fake.cu)
    fake.reset(devices=2, total_bytes=64 << 20)
    yield fake
    fake.reset()


@pytest.fixture
def driver(fake: FakeCuda) -> Driver:
    """With cuInit called and the primary context of device 0 current."""
    driver = Driver(fake.cu)
    driver.start()
    return driver
