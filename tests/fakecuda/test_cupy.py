"""CuPy's own driver module runs on the stand-in, found as any process finds its driver: by the soname."""

import subprocess
import sys

from tests.fakecuda.control import environment

PROGRAM = """
import ctypes
from cupy.cuda import driver

cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
assert driver.ctxGetCurrent() == 0

context = driver.ctxCreate(1)
assert driver.ctxGetCurrent() == context
assert driver.ctxGetDevice() == 1
driver.ctxDestroy(context)
assert driver.ctxGetCurrent() == 0

primary = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0) == 0
driver.ctxSetCurrent(primary.value)
assert driver.ctxGetDevice() == 0
stream = ctypes.c_void_p()
assert cuda.cuStreamCreate(ctypes.byref(stream), 0) == 0
assert driver.streamGetCtx(stream.value) == primary.value
driver.devicePrimaryCtxRelease(0)

try:
    driver.check_status(2)
except driver.CUDADriverError as error:
    print(error, error.status)
try:
    driver.ctxSetCurrent(primary.value)
except driver.CUDADriverError as error:
    print(error, error.status)
"""


def test_cupys_driver_module_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory 2",
        "CUDA_ERROR_INVALID_CONTEXT: invalid device context 201",
    ]
