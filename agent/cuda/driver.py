"""What CuPy's driver module lacks, as it would have it, so that it could go there.

CuPy 14 (`cupy.cuda.driver`) binds contexts, modules, launches and occupancy, and has the error type. It
binds none of CUDA's virtual memory, nor cuInit, devices, retaining a primary context and the memory's size,
nor events and stream waits without the CUDA runtime. Those are here, resolved from the same libcuda.so.1,
beside CuPy's own bindings. As there, the `cu` prefix is left out, results are returned, and a failed call
raises CuPy's CUDADriverError. What CuPy has is its own: current contexts, and releasing a primary one.

CuPy's runtime module is never used: it brings the CUDA runtime with it, which needs more of a driver.
"""

import functools
from collections.abc import Sequence
from ctypes import (
    CFUNCTYPE,
    Array,
    Structure,
    byref,
    c_char,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from typing import Any

from kvquota.agent.cuda.library import CudaUnavailableError, address

CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
CU_MEM_ALLOCATION_TYPE_PINNED = 1
CU_MEM_LOCATION_TYPE_DEVICE = 1
CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0
CU_EVENT_BLOCKING_SYNC = 1
CU_EVENT_DISABLE_TIMING = 2


class MemLocation(Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocFlags(Structure):
    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class MemAllocationProp(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", _AllocFlags),
    )


class MemAccessDesc(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", c_int))


@functools.cache
def cupy_driver() -> Any:
    """CuPy's own driver module. Raises CudaUnavailableError."""
    try:
        from cupy.cuda import driver
    except ImportError as error:
        raise CudaUnavailableError(
            f"GPU memory is mapped through CuPy, which can't be imported ({error}): pip install "
            "'kvquota[cuda12]' or 'kvquota[cuda13]', after the driver's CUDA version"
        ) from error
    return driver


@functools.cache
def _function(name: str) -> Any:
    return CFUNCTYPE(c_int)(address(name))


def _call(name: str, *arguments: Any) -> None:
    # ctypes lets other threads run meanwhile.
    cupy_driver().check_status(_function(name)(*arguments))


def init(flags: int = 0) -> None:
    """Load the driver. It makes no context, and may be called again."""
    _call("cuInit", c_uint(flags))


def deviceGetCount() -> int:
    """The devices that CUDA_VISIBLE_DEVICES leaves."""
    count = c_int()
    _call("cuDeviceGetCount", byref(count))
    return count.value


def deviceGet(ordinal: int) -> int:
    """The device of an index among those that are visible."""
    device = c_int()
    _call("cuDeviceGet", byref(device), c_int(ordinal))
    return device.value


def deviceGetName(device: int) -> str:
    """What the device is called."""
    name: Array[c_char] = (c_char * 256)()
    _call("cuDeviceGetName", name, c_int(len(name)), c_int(device))
    return name.value.decode(errors="replace")


def deviceGetUuid(device: int) -> bytes:
    """The 16 bytes of the device's UUID: in MIG mode, the one of its instance."""
    uuid: Array[c_char] = (c_char * 16)()
    _call("cuDeviceGetUuid", uuid, c_int(device))
    return uuid.raw


def deviceGetAttribute(attribute: int, device: int) -> int:
    """One of CU_DEVICE_ATTRIBUTE_*."""
    value = c_int()
    _call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(device))
    return value.value


def devicePrimaryCtxRetain(device: int) -> int:
    """The device's primary context, made where there is none: some 400 MiB of the GPU."""
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
    return context.value or 0


def memGetInfo() -> tuple[int, int]:
    """Free and total bytes of the current context's device."""
    free, total = c_size_t(), c_size_t()
    _call("cuMemGetInfo", byref(free), byref(total))
    return free.value, total.value


def memGetAllocationGranularity(prop: MemAllocationProp, option: int) -> int:
    """Bytes that the size of such memory must be a multiple of."""
    granularity = c_size_t()
    _call("cuMemGetAllocationGranularity", byref(granularity), byref(prop), c_int(option))
    return granularity.value


def memAddressReserve(size: int, alignment: int = 0, addr: int = 0, flags: int = 0) -> int:
    """Addresses with nothing behind them."""
    ptr = c_ulonglong()
    _call(
        "cuMemAddressReserve",
        byref(ptr),
        c_size_t(size),
        c_size_t(alignment),
        c_ulonglong(addr),
        c_ulonglong(flags),
    )
    return ptr.value


def memAddressFree(ptr: int, size: int) -> None:
    """Give a whole reservation back."""
    _call("cuMemAddressFree", c_ulonglong(ptr), c_size_t(size))


def memCreate(size: int, prop: MemAllocationProp, flags: int = 0) -> int:
    """Take physical memory, and return its handle."""
    handle = c_ulonglong()
    _call("cuMemCreate", byref(handle), c_size_t(size), byref(prop), c_ulonglong(flags))
    return handle.value


def memRelease(handle: int) -> None:
    """Give physical memory back, once nothing maps it."""
    _call("cuMemRelease", c_ulonglong(handle))


def memMap(ptr: int, size: int, offset: int, handle: int, flags: int = 0) -> None:
    """Put physical memory behind addresses. It can't be used before memSetAccess."""
    _call(
        "cuMemMap",
        c_ulonglong(ptr),
        c_size_t(size),
        c_size_t(offset),
        c_ulonglong(handle),
        c_ulonglong(flags),
    )


def memUnmap(ptr: int, size: int) -> None:
    """Take physical memory from behind addresses."""
    _call("cuMemUnmap", c_ulonglong(ptr), c_size_t(size))


def memSetAccess(ptr: int, size: int, desc: Sequence[MemAccessDesc]) -> None:
    """Say which devices may use mapped addresses."""
    array = (MemAccessDesc * len(desc))(*desc)
    _call("cuMemSetAccess", c_ulonglong(ptr), c_size_t(size), array, c_size_t(len(desc)))


def eventCreate(flags: int = 0) -> int:
    """An event in the current context."""
    event = c_void_p()
    _call("cuEventCreate", byref(event), c_uint(flags))
    return event.value or 0


def eventRecord(event: int, stream: int = 0) -> None:
    """Put an event behind what the stream was given so far."""
    _call("cuEventRecord", c_void_p(event), c_void_p(stream))


def eventQuery(event: int) -> int:
    """The status, as of CuPy's eventQuery in its runtime module: 0, or CUDA_ERROR_NOT_READY."""
    status: int = _function("cuEventQuery")(c_void_p(event))
    return status


def eventSynchronize(event: int) -> None:
    """Wait until an event has passed."""
    _call("cuEventSynchronize", c_void_p(event))


def eventDestroy(event: int) -> None:
    """Give an event back."""
    _call("cuEventDestroy", c_void_p(event))


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    """Let what the stream is given from here on wait for an event."""
    _call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(flags))
