from collections.abc import Iterator

import pytest

from tests.native.devices import DEVICES, Device


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each device in turn, on which nothing must be left."""
    device = DEVICES[request.param]()
    yield device
    device.close()
