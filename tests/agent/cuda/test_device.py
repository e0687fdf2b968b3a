"""Which GPU a driver is for, and what holds its context."""

import gc
from uuid import UUID

import pytest
from kvquota.agent.cuda import CudaUnavailableError, driver, open_driver
from kvquota.agent.cuda.library import addresses
from kvquota.native import Arena, CudaDriver, DriverError

from tests.fakecuda.control import UNKNOWN, FakeCuda, Live
from tests.native import capsule
from tests.native.arenas import GRANULE, ask

FIRST = "fa4ec0d0-0000-4000-8000-000000000000"
SECOND = "fa4ec0d1-0000-4000-8000-000000000000"


def ordinal(opened: CudaDriver) -> int:
    """The device of its tensors, as their consumer is told."""
    arena = Arena(opened, [GRANULE], 1)
    held = arena.dlpack(0, [4], 0, 8)
    device: int = capsule.read(held).device_id
    del held
    arena.close()
    return device


@pytest.mark.parametrize("device", [1, f"GPU-{SECOND}", f"MIG-{SECOND.upper()}", SECOND])
def test_by_index_and_by_uuid(fake: FakeCuda, device: int | str) -> None:
    assert ordinal(open_driver(device)) == 1


def test_visible_devices_are_the_drivers_to_number(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for device in 0, f"GPU-{SECOND}":
        assert ordinal(open_driver(device)) == 0
    assert UUID(bytes=driver.deviceGetUuid(0)) == UUID(SECOND)
    with pytest.raises(
        ValueError,
        match="device 1 is not among the 1 GPUs that are visible under CUDA_VISIBLE_DEVICES=1",
    ):
        open_driver(1)
    with pytest.raises(ValueError, match=f"GPU-{FIRST} is none of those .*VISIBLE_DEVICES=1: {SECOND}"):
        open_driver(f"GPU-{FIRST}")
    assert fake.live() == Live()


@pytest.mark.parametrize("device", [-1, 2, "GPU-0", "", "0"])
def test_a_device_that_is_not_there_is_refused(fake: FakeCuda, device: int | str) -> None:
    with pytest.raises(ValueError, match=f"device {device} is n.*visible"):
        open_driver(device)
    assert fake.live() == Live()


def test_without_a_visible_gpu_cuda_says_so(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(driver.cupy_driver().CUDADriverError, match="CUDA_ERROR_NO_DEVICE") as caught:
        open_driver(0)
    assert caught.value.status == 100


def test_a_gpu_without_virtual_memory_is_refused(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "deviceGetAttribute", lambda *_: 0)
    with pytest.raises(CudaUnavailableError, match=r"device 0 \(Stand-in GPU\) has no virtual memory"):
        open_driver(0)
    assert fake.live() == Live()


@pytest.mark.parametrize(
    ("least", "granularity"), [(64 << 10, 2 << 20), (2 << 20, 2 << 20), (16 << 20, 16 << 20)]
)
def test_a_granule_is_what_the_gpu_maps_at_least_and_2_mib(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, least: int, granularity: int
) -> None:
    monkeypatch.setattr(driver, "memGetAllocationGranularity", lambda *_: least)
    assert open_driver(0).granularity == granularity


def test_the_context_lasts_as_long_as_what_stands_on_it(fake: FakeCuda) -> None:
    opened = open_driver(0)
    assert fake.live().contexts == 1
    arena = Arena(opened, [GRANULE], 4)
    del opened
    held = arena.dlpack(0, [GRANULE], 0, 8)
    ask(arena, 1)
    arena.apply(1, [0], [])
    del arena
    gc.collect()
    assert (fake.live().contexts, fake.live().handles) == (1, 1)
    del held
    gc.collect()
    assert fake.live() == Live()


@pytest.mark.parametrize("arguments", [{"context": 0}, {"granularity": 3}, {"granularity": 0}])
def test_impossible_arguments_are_refused(fake: FakeCuda, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        CudaDriver(addresses(), **{"device": 0, "context": 1, "granularity": GRANULE, **arguments})


def test_a_missing_function_is_named(fake: FakeCuda) -> None:
    functions = addresses()
    del functions["cuMemMap"]
    with pytest.raises(ValueError, match="functions has no address for cuMemMap"):
        CudaDriver(functions, device=0, context=1, granularity=GRANULE)


def test_an_error_of_cuda_has_its_name_and_number(fake: FakeCuda) -> None:
    opened = open_driver(0)
    fake.fail("cuMemCreate", code=UNKNOWN)
    with pytest.raises(DriverError, match=r"mem_create failed with CUDA_ERROR_UNKNOWN \(999\)") as caught:
        opened.mem_create(GRANULE)
    assert (caught.value.code, caught.value.name) == (999, "CUDA_ERROR_UNKNOWN")
    fake.fail("cuMemCreate", code=12345)
    with pytest.raises(DriverError, match=r"mem_create failed with unknown CUDA error \(12345\)"):
        opened.mem_create(GRANULE)
