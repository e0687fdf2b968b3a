"""The devices that a process sees, and what they say of themselves."""

import ctypes
import uuid
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

import pytest

from tests.fakecuda.control import (
    INVALID_DEVICE,
    INVALID_VALUE,
    NO_DEVICE,
    NOT_INITIALIZED,
    SUCCESS,
    FakeCuda,
)

FIRST = "GPU-fa4ec0d0-0000-4000-8000-000000000000"
SECOND = "GPU-fa4ec0d1-0000-4000-8000-000000000000"


def uuid_of(fake: FakeCuda, device: int) -> str:
    found = ctypes.create_string_buffer(16)
    assert fake.cu.cuDeviceGetUuid_v2(found, device) == SUCCESS
    return f"GPU-{uuid.UUID(bytes=found.raw)}"


def visible(fake: FakeCuda) -> list[str]:
    count = c_int()
    assert fake.cu.cuDeviceGetCount(byref(count)) == SUCCESS
    return [uuid_of(fake, device) for device in range(count.value)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [FIRST, SECOND]),
        ("0,1", [FIRST, SECOND]),
        ("1,0", [SECOND, FIRST]),
        ("1", [SECOND]),
        (SECOND, [SECOND]),
        ("GPU-fa4ec0d1", [SECOND]),
        ("GPU-fa4ec0d1,0", [SECOND, FIRST]),
        ("1,-1,0", [SECOND]),  # nothing counts from the first invalid item on
        ("0,7,1", [FIRST]),
        ("0,GPU-fa4e", [FIRST]),  # two have this prefix
        ("0,x", [FIRST]),
        ("0,0", [FIRST]),
    ],
)
def test_visible_devices(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: list[str]
) -> None:
    set_visible(monkeypatch, setting)
    assert fake.cu.cuInit(0) == SUCCESS
    assert visible(fake) == expected


@pytest.mark.parametrize("setting", ["", "-1", "2", "GPU-0", "none"])
def test_no_device_is_visible(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    set_visible(monkeypatch, setting)
    assert fake.cu.cuInit(0) == NO_DEVICE
    assert fake.cu.cuDeviceGetCount(byref(c_int())) == NOT_INITIALIZED


def set_visible(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    if setting is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)


def test_what_a_device_says(fake: FakeCuda) -> None:
    assert fake.cu.cuInit(0) == SUCCESS
    device, value, total = c_int(-1), c_int(), c_size_t()
    assert fake.cu.cuDeviceGet(byref(device), 1) == SUCCESS
    assert device.value == 1
    assert fake.cu.cuDeviceTotalMem_v2(byref(total), 1) == SUCCESS
    assert total.value == 64 << 20
    assert fake.cu.cuDeviceGetAttribute(byref(value), 102, 1) == SUCCESS  # virtual memory management
    assert value.value == 1
    name = ctypes.create_string_buffer(8)
    assert fake.cu.cuDeviceGetName(name, len(name), 0) == SUCCESS
    assert name.value == b"Stand-i"  # cut to fit


def test_a_device_that_is_not_there(fake: FakeCuda) -> None:
    assert fake.cu.cuInit(0) == SUCCESS
    for device in (-1, 2):
        assert fake.cu.cuDeviceGet(byref(c_int()), device) == INVALID_DEVICE
        assert fake.cu.cuDeviceTotalMem_v2(byref(c_size_t()), device) == INVALID_DEVICE
        assert fake.cu.cuDeviceGetAttribute(byref(c_int()), 102, device) == INVALID_DEVICE
        assert fake.cu.cuDeviceGetUuid_v2(ctypes.create_string_buffer(16), device) == INVALID_DEVICE
    assert fake.cu.cuDeviceGetAttribute(byref(c_int()), 0, 0) == INVALID_VALUE


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("cuMemMap", 12000, 0),
        ("cuMemMap", 10020, 0),
        ("cuMemMap", 10010, 2),
        ("cuMemGetInfo", 12080, 0),
        ("cuMemGetInfo_v2", 12080, 1),  # names go without a version
        ("cuNothing", 12000, 1),
    ],
)
def test_entry_points_by_name(fake: FakeCuda, name: str, version: int, found: int) -> None:
    function, status = c_void_p(1), c_int(-1)
    assert fake.cu.cuGetProcAddress_v2(name.encode(), byref(function), version, 0, byref(status)) == SUCCESS
    assert status.value == found
    assert bool(function.value) == (found == 0)


def test_an_entry_point_by_name_is_the_function(fake: FakeCuda) -> None:
    function = c_void_p()
    assert fake.cu.cuGetProcAddress_v2(b"cuDeviceGetUuid", byref(function), 11040, 0, None) == SUCCESS
    assert function.value == ctypes.cast(fake.cu.cuDeviceGetUuid_v2, c_void_p).value
    assert fake.cu.cuGetProcAddress_v2(b"cuDeviceGetUuid", byref(function), 9020, 0, None) == SUCCESS
    assert function.value == ctypes.cast(fake.cu.cuDeviceGetUuid, c_void_p).value
    assert fake.cu.cuGetProcAddress_v2(b"cuInit", byref(function), 99000, 0, None) == INVALID_VALUE


def test_every_entry_point_is_there(fake: FakeCuda) -> None:
    from tests.fakecuda.api import SIGNATURES

    for symbol in SIGNATURES:
        function, status = c_void_p(), c_int(-1)
        name = symbol.split("_v")[0]
        assert fake.cu.cuGetProcAddress_v2(name.encode(), byref(function), 12080, 0, byref(status)) == SUCCESS
        assert (name, status.value) == (name, 0)


def test_error_names(fake: FakeCuda) -> None:
    text = c_char_p()
    assert fake.cu.cuGetErrorName(2, byref(text)) == SUCCESS
    assert text.value == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert fake.cu.cuGetErrorString(2, byref(text)) == SUCCESS
    assert text.value == b"out of memory"
    assert fake.cu.cuGetErrorName(12345, byref(text)) == INVALID_VALUE
    assert text.value is None
