import pytest

from tests.fakecuda.control import FakeCuda, load


@pytest.fixture
def fake() -> FakeCuda:
    """The stand-in on a machine with two GPUs, which nothing has called yet."""
    fake = load()
    fake.reset(devices=2, total_bytes=64 << 20)
    return fake
