"""Where the functions of libcuda.so.1 come from, and what is said where they are not there."""

import subprocess
import sys
from collections.abc import Iterator
from ctypes import CDLL
from typing import Any

import pytest
from kvquota.agent.cuda import CudaUnavailableError, driver, library

from tests.fakecuda.control import NOT_FOUND, FakeCuda, environment

OPEN = "from kvquota.agent.cuda import open_driver; open_driver(0)"


@pytest.fixture
def forgetful(fake: FakeCuda) -> Iterator[None]:
    """Functions are looked up anew."""
    library.address.cache_clear()
    yield
    library.address.cache_clear()


def run(program: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100, check=False
    )


def test_functions_are_of_the_library_that_cupy_loads(fake: FakeCuda) -> None:
    driver.init()
    context = driver.devicePrimaryCtxRetain(0)
    cupy = driver.cupy_driver()
    cupy.ctxSetCurrent(context)
    assert (cupy.ctxGetCurrent(), fake.calls("cuCtxGetCurrent")) == (context, 1)
    assert driver.memGetInfo() == (64 << 20, 64 << 20)
    cupy.ctxSetCurrent(0)
    cupy.devicePrimaryCtxRelease(0)
    assert fake.live().contexts == 0


def test_without_the_drivers_own_look_up_exported_symbols_are_found(
    forgetful: None, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = library.addresses()
    library.address.cache_clear()

    class Old:
        """A library from before cuGetProcAddress."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("cuGetProcAddress"):
                raise AttributeError(name)
            return getattr(CDLL("libcuda.so.1"), name)

    monkeypatch.setattr(library, "_library", Old)
    assert library.addresses() == looked_up
    assert len(set(looked_up.values())) == len(looked_up)


def test_a_driver_that_is_too_old_is_named(forgetful: None, fake: FakeCuda) -> None:
    fake.fail("cuGetProcAddress", times=1000, code=NOT_FOUND)
    with pytest.raises(CudaUnavailableError, match=r"no cuMemCreate, which came with CUDA 10\.2: install"):
        library.address("cuMemCreate")


def test_without_an_nvidia_driver_it_says_so() -> None:
    env = environment()
    del env["LD_LIBRARY_PATH"]
    result = run(OPEN, env)
    assert result.returncode == 1
    assert "CudaUnavailableError: no NVIDIA driver here: libcuda.so.1" in result.stderr


def test_without_cupy_it_says_what_to_install() -> None:
    result = run(f"import sys; sys.modules['cupy'] = None; {OPEN}", environment())
    assert result.returncode == 1
    assert "pip install 'kvquota[cuda12]' or 'kvquota[cuda13]'" in result.stderr


def test_a_process_that_does_not_map_gets_no_context() -> None:
    program = """
import sys
from tests.fakecuda.control import load
fake = load()
import kvquota.agent.cuda
print("cupy" in sys.modules, fake.calls("cuInit"), fake.live().contexts)
"""
    result = run(program, environment())
    assert (result.stdout, result.stderr) == ("False 0 0\n", "")
