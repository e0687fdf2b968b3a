"""The devices that the driver table's tests run on: the host, and CUDA on the stand-in or on a GPU."""

import ctypes
import os
from typing import Any, Protocol

from kvquota.agent.cuda import driver as cuda
from kvquota.agent.cuda import open_driver
from kvquota.native import DeviceRecord, Driver, HostDriver

from tests.fakecuda.control import load
from tests.native.arenas import taken

CAPACITY = 1 << 30


def on_gpu() -> bool:
    """Whether `cuda` is a real GPU, and not the stand-in: see tests.gpu.check."""
    return os.environ.get("KVQUOTA_TEST_CUDA") == "gpu"


class Device(Protocol):
    """A device with a driver, and what a test wants to know beside it."""

    @property
    def driver(self) -> Driver: ...

    def taken(self) -> int:
        """Bytes of physical memory that were taken through the driver."""

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, size: int) -> bytes: ...

    def close(self) -> None:
        """Check that nothing is left."""


class Host:
    def __init__(self) -> None:
        self._record = DeviceRecord.create(CAPACITY)
        self.driver = HostDriver(fill=0xFF)
        self.driver.attach(self._record.fileno())

    def taken(self) -> int:
        return taken(self.driver)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def close(self) -> None:
        assert (self.taken(), self._record.used_bytes) == (0, 0)
        self._record.close()


class Cuda:
    """Memory is reached by the driver's copies, as on a GPU."""

    def __init__(self) -> None:
        self._fake = None if on_gpu() else load()
        if self._fake is not None:
            self._fake.reset(total_bytes=CAPACITY)
            self._fake.fill(0xFF)
        self.driver: Driver = open_driver(0)
        self._cupy = cuda.cupy_driver()
        self._context = cuda.devicePrimaryCtxRetain(0)
        self._library = ctypes.CDLL("libcuda.so.1")
        self._warm_up()
        self._free = self.driver.mem_get_info()[0]

    def _warm_up(self) -> None:
        """Let a GPU take now what it takes once, beside a first granule's memory."""
        granule = self.driver.granularity
        address, handle = self.driver.address_reserve(granule), self.driver.mem_create(granule)
        self.driver.mem_map(address, granule, handle)
        self.driver.mem_set_access(address, granule)
        self.driver.mem_unmap(address, granule)
        self.driver.mem_release(handle)
        self.driver.address_free(address, granule)

    def taken(self) -> int:
        return self._free - self.driver.mem_get_info()[0]

    def write(self, address: int, data: bytes) -> None:
        self._copy("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, len(data))

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._copy("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), size)
        return data.raw

    def close(self) -> None:
        assert self.taken() == 0
        self._cupy.devicePrimaryCtxRelease(0)
        if self._fake is not None:
            # The test still holds the driver, so its context and events are there.
            live = self._fake.live()
            assert (live.works, live.reservations, live.mappings, live.handles, live.bytes) == (0, 0, 0, 0, 0)
            assert self._fake.traps() == []

    def _copy(self, name: str, to: Any, source: Any, size: int) -> None:
        before = self._cupy.ctxGetCurrent()
        self._cupy.ctxSetCurrent(self._context)
        try:
            status = getattr(self._library, name)(to, source, ctypes.c_size_t(size))
        finally:
            self._cupy.ctxSetCurrent(before)
        self._cupy.check_status(status)


DEVICES: dict[str, type[Host] | type[Cuda]] = {"host": Host, "cuda": Cuda}
