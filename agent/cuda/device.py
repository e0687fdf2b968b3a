"""A GPU as a driver of arenas."""

import os
from uuid import UUID

from kvquota.agent.cuda import driver
from kvquota.agent.cuda.library import CudaUnavailableError, addresses
from kvquota.native import CudaDriver

_GRANULE = 2 << 20


def open_driver(device: int | str) -> CudaDriver:
    """The driver of one GPU, by its index among the visible ones or by its UUID (`GPU-...`, `MIG-...`).

    It retains the GPU's primary context, which lasts as long as driver, arenas and tensors over them. Raises
    CudaUnavailableError, ValueError for a device that is not there, and CuPy's CUDADriverError.
    """
    cupy_driver = driver.cupy_driver()
    functions = addresses()
    driver.init()
    gpu = _find(device)
    supported = driver.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not driver.deviceGetAttribute(supported, gpu):
        raise CudaUnavailableError(f"device {device} ({driver.deviceGetName(gpu)}) has no virtual memory")
    granularity = _granularity(gpu)
    context = driver.devicePrimaryCtxRetain(gpu)
    try:
        return CudaDriver(functions, device=gpu, context=context, granularity=granularity)
    except BaseException:
        cupy_driver.devicePrimaryCtxRelease(gpu)
        raise


def _granularity(gpu: int) -> int:
    """The least that the GPU maps, in whole granules of 2 MiB.

    Not what it recommends: that speeds up large memory, and would make every page as large.
    """
    prop = driver.MemAllocationProp(
        type=driver.CU_MEM_ALLOCATION_TYPE_PINNED,
        location=driver.MemLocation(driver.CU_MEM_LOCATION_TYPE_DEVICE, gpu),
    )
    least = driver.memGetAllocationGranularity(prop, driver.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
    return max(least, _GRANULE)


def _find(device: int | str) -> int:
    count = driver.deviceGetCount()
    if isinstance(device, int):
        if 0 <= device < count:
            return driver.deviceGet(device)
        raise ValueError(f"device {device} is not among the {count} GPUs that are visible{_visible()}")
    gpus = [driver.deviceGet(ordinal) for ordinal in range(count)]
    uuids = [str(UUID(bytes=driver.deviceGetUuid(gpu))) for gpu in gpus]
    # The bytes don't say whether they name a GPU or an instance of one.
    wanted = device.lower().removeprefix("gpu-").removeprefix("mig-")
    if wanted in uuids:
        return gpus[uuids.index(wanted)]
    raise ValueError(f"device {device} is none of those that are visible{_visible()}: {', '.join(uuids)}")


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" under CUDA_VISIBLE_DEVICES={value}"
