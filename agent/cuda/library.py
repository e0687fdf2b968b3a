"""The functions of libcuda.so.1, of the very library that CuPy loads.

CuPy opens it by this name, when it first needs it. A name that is open already gives the same library again,
whoever opened it first.
"""

import functools
from ctypes import CDLL, CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_uint64, c_void_p, cast
from typing import NamedTuple

_NAME = "libcuda.so.1"


class CudaUnavailableError(RuntimeError):
    """There is no CUDA that could be used here; the message says what is missing."""


class _Form(NamedTuple):
    """The form of a function that is called here: the API version it came with, and its exported symbol."""

    version: int
    symbol: str


_FORMS = {
    "cuInit": _Form(2000, "cuInit"),
    "cuGetErrorName": _Form(6000, "cuGetErrorName"),
    "cuDeviceGet": _Form(2000, "cuDeviceGet"),
    "cuDeviceGetCount": _Form(2000, "cuDeviceGetCount"),
    "cuDeviceGetName": _Form(2000, "cuDeviceGetName"),
    "cuDeviceGetUuid": _Form(11040, "cuDeviceGetUuid_v2"),
    "cuDeviceGetAttribute": _Form(2000, "cuDeviceGetAttribute"),
    "cuDevicePrimaryCtxRetain": _Form(7000, "cuDevicePrimaryCtxRetain"),
    "cuDevicePrimaryCtxRelease": _Form(11000, "cuDevicePrimaryCtxRelease_v2"),
    "cuCtxGetCurrent": _Form(4000, "cuCtxGetCurrent"),
    "cuCtxSetCurrent": _Form(4000, "cuCtxSetCurrent"),
    "cuMemGetInfo": _Form(3020, "cuMemGetInfo_v2"),
    "cuMemGetAllocationGranularity": _Form(10020, "cuMemGetAllocationGranularity"),
    "cuMemAddressReserve": _Form(10020, "cuMemAddressReserve"),
    "cuMemAddressFree": _Form(10020, "cuMemAddressFree"),
    "cuMemCreate": _Form(10020, "cuMemCreate"),
    "cuMemRelease": _Form(10020, "cuMemRelease"),
    "cuMemMap": _Form(10020, "cuMemMap"),
    "cuMemUnmap": _Form(10020, "cuMemUnmap"),
    "cuMemSetAccess": _Form(10020, "cuMemSetAccess"),
    "cuEventCreate": _Form(2000, "cuEventCreate"),
    "cuEventRecord": _Form(2000, "cuEventRecord"),
    "cuEventQuery": _Form(2000, "cuEventQuery"),
    "cuEventSynchronize": _Form(2000, "cuEventSynchronize"),
    "cuEventDestroy": _Form(4000, "cuEventDestroy_v2"),
    "cuStreamWaitEvent": _Form(3020, "cuStreamWaitEvent"),
}

_GetProcAddress = CFUNCTYPE(c_int, c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int))


@functools.cache
def _library() -> CDLL:
    try:
        return CDLL(_NAME)
    except OSError as error:
        raise CudaUnavailableError(
            f"no NVIDIA driver here: {error}. Install it, or pass it into the container"
        ) from error


@functools.cache
def address(name: str) -> int:
    """Where the function is that cuda.h calls `name`. Raises CudaUnavailableError."""
    form = _FORMS[name]
    library = _library()
    get_proc_address = getattr(library, "cuGetProcAddress_v2", None)
    if get_proc_address is None:
        function = getattr(library, form.symbol, None)
        found = cast(function, c_void_p).value if function is not None else None
    else:
        pointer = c_void_p()
        resolve = _GetProcAddress(cast(get_proc_address, c_void_p).value or 0)
        status = resolve(name.encode(), byref(pointer), form.version, 0, byref(c_int()))
        found = pointer.value if status == 0 else None
    if not found:
        raise CudaUnavailableError(
            f"the NVIDIA driver has no {form.symbol}, which came with CUDA {form.version // 1000}."
            f"{form.version % 1000 // 10}: install a newer one"
        )
    return found


def addresses() -> dict[str, int]:
    """Every function that is known here, by the name that cuda.h gives it. Raises CudaUnavailableError."""
    return {name: address(name) for name in _FORMS}
