"""The driver's signatures for ctypes, so that a test calls `cu.cuMemMap(address, size, 0, handle, 0)`."""

import ctypes
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ushort,
    c_void_p,
)
from typing import Any

from tests.fakecuda.control import SUCCESS

NONE, READ, READWRITE = 0, 1, 3


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class Properties(Structure):
    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", AllocationFlags),
    ]


class Access(Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuGetProcAddress": [c_char_p, POINTER(c_void_p), c_int, c_uint64],
    "cuGetProcAddress_v2": [c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetUuid_v2": [c_void_p, c_int],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuDevicePrimaryCtxGetState": [c_int, POINTER(c_uint), POINTER(c_int)],
    "cuCtxCreate_v2": [POINTER(c_void_p), c_uint, c_int],
    "cuCtxDestroy_v2": [c_void_p],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuCtxGetDevice": [POINTER(c_int)],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(Properties), c_int],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(Access), c_size_t],
    "cuMemGetAccess": [POINTER(c_uint64), POINTER(Location), c_uint64],
    "cuMemGetAllocationPropertiesFromHandle": [POINTER(Properties), c_uint64],
    "cuMemRetainAllocationHandle": [POINTER(c_uint64), c_void_p],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemsetD8_v2": [c_uint64, c_ubyte, c_size_t],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamGetCtx": [c_void_p, POINTER(c_void_p)],
    "cuStreamQuery": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventDestroy_v2": [c_void_p],
}


def declare(cu: ctypes.CDLL) -> Any:
    """The library with its signatures declared."""
    for name, arguments in SIGNATURES.items():
        getattr(cu, name).argtypes = arguments
    return cu


def on(device: int = 0) -> Properties:
    """Memory of a device, as cuMemCreate wants to be told."""
    return Properties(type=1, location=Location(type=1, id=device))


def access(*devices: int, flags: int = READWRITE) -> Any:
    """Access of these devices, as cuMemSetAccess wants to be told."""
    return (Access * len(devices))(*[Access(Location(1, device), flags) for device in devices])


class Driver:
    """The calls that most tests make to get somewhere; each must succeed."""

    def __init__(self, cu: Any) -> None:
        self.cu = cu

    def start(self, device: int = 0) -> None:
        """Initialise, and make a device's primary context current."""
        self.ok(self.cu.cuInit(0))
        self.ok(self.cu.cuCtxSetCurrent(self.retain(device)))

    def retain(self, device: int = 0) -> int:
        context = c_void_p()
        self.ok(self.cu.cuDevicePrimaryCtxRetain(byref(context), device))
        return context.value or 0

    def reserve(self, size: int, alignment: int = 0) -> int:
        address = c_uint64()
        self.ok(self.cu.cuMemAddressReserve(byref(address), size, alignment, 0, 0))
        return address.value

    def create(self, size: int, device: int = 0) -> int:
        handle = c_uint64()
        self.ok(self.cu.cuMemCreate(byref(handle), size, byref(on(device)), 0))
        return handle.value

    def map(self, address: int, size: int, device: int = 0) -> int:
        """Create memory, map it with access for its device, and return its handle."""
        handle = self.create(size, device)
        self.ok(self.cu.cuMemMap(address, size, 0, handle, 0))
        self.ok(self.cu.cuMemSetAccess(address, size, access(device), 1))
        return handle

    def free_and_total(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self.ok(self.cu.cuMemGetInfo_v2(byref(free), byref(total)))
        return free.value, total.value

    def stream(self, flags: int = 0) -> int:
        stream = c_void_p()
        self.ok(self.cu.cuStreamCreate(byref(stream), flags))
        return stream.value or 0

    def event(self, stream: int | None = None) -> int:
        """A new event, recorded on `stream` unless that is None."""
        event = c_void_p()
        self.ok(self.cu.cuEventCreate(byref(event), 2))
        if stream is not None:
            self.ok(self.cu.cuEventRecord(event, stream))
        return event.value or 0

    @staticmethod
    def ok(status: int) -> None:
        assert status == SUCCESS, f"error {status}"
