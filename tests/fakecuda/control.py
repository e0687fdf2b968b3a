"""Builds the stand-in `libcuda.so.1`, loads it, and tells it what a test wants."""

import ctypes
import functools
import gc
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
GRANULE = 2 << 20

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
CONTEXT_IS_DESTROYED = 709
NOT_SUPPORTED = 801
UNKNOWN = 999

# Microseconds on an A100: a fixed part of each call, and a part for each granule of 2 MiB.
A100 = {
    "cuMemAddressReserve": (19.0, 0.0),
    "cuMemCreate": (0.0, 193.0),
    "cuMemMap": (0.0, 1.5),
    "cuMemSetAccess": (26.0, 10.0),
    "cuMemUnmap": (16.0, 10.0),
}


@dataclass(frozen=True)
class Live:
    """What exists now, in the process; all zero where nothing leaked."""

    contexts: int = 0
    streams: int = 0
    events: int = 0
    works: int = 0
    reservations: int = 0
    mappings: int = 0
    handles: int = 0
    bytes: int = 0


class _Live(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in Live.__dataclass_fields__]


CONTROLS: dict[str, tuple[Any, list[Any]]] = {
    "reset": (None, [c_int, c_uint64]),
    "fail": (c_bool, [c_char_p, c_uint64, c_uint64, c_int]),
    "price": (c_bool, [c_char_p, c_double, c_double]),
    "calls": (c_bool, [c_char_p, c_int, POINTER(c_uint64)]),
    "charged": (c_double, [c_int]),
    "work_begin": (c_int, [c_void_p, c_uint64, c_uint64, POINTER(c_uint64)]),
    "work_end": (c_bool, [c_uint64]),
    "trap": (c_bool, [c_size_t, c_char_p, c_size_t]),
    "live": (None, [POINTER(_Live)]),
    "set_total": (c_bool, [c_int, c_uint64]),
    "hog": (c_bool, [c_int, c_uint64]),
    "set_data": (None, [c_bool]),
    "set_fill": (None, [c_int]),
}


@functools.cache
def build() -> Path:
    """The path of the library, compiled once for each state of its sources.

    With the compiler's sanitizers that FAKECUDA_SANITIZERS names.
    """
    sanitizers = os.environ.get("FAKECUDA_SANITIZERS")
    sources = sorted(SOURCES.glob("*.cpp"))
    command = [
        os.environ.get("CXX", "g++"),
        *("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"),
        *([f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []),
        *("-shared", "-pthread", "-Wl,-soname,libcuda.so.1"),
        *map(str, sources),
        "-ldl",
    ]
    digest = hashlib.sha256("\0".join(command).encode())
    for source in sorted([*sources, *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    folder = SOURCES.parents[1] / "build" / "fakecuda" / digest.hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as other:  # two test runs may build it at once
            subprocess.run([*command, "-o", other.name], check=True, timeout=300)
            os.link(other.name, folder / f"built-{os.getpid()}")
        os.replace(folder / f"built-{os.getpid()}", library)
    return library


def environment(
    devices: int = 1,
    total_bytes: int = 16 << 30,
    state: Path | None = None,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """For a process of its own that finds the stand-in.

    Processes with the same `state`, a file that need not exist, share each device's memory.
    """
    path = [str(build().parent), *filter(None, [base.get("LD_LIBRARY_PATH")])]
    return {
        **{name: value for name, value in base.items() if name != "CUDA_VISIBLE_DEVICES"},
        "LD_LIBRARY_PATH": os.pathsep.join(path),
        "FAKECUDA_DEVICES": str(devices),
        "FAKECUDA_MEMORY": str(total_bytes),
        **({"FAKECUDA_STATE": str(state)} if state else {}),
    }


class Work:
    """Work in flight on a stream. `end` it, or leave a `with` block."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class FakeCuda:
    """The stand-in that this process has loaded. Names are those of the driver API's reference."""

    def __init__(self, library: Path) -> None:
        self.library = library
        # Whoever opens libcuda.so.1 from here on finds this one, by its soname.
        self.cu = ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        for name, (result, arguments) in CONTROLS.items():
            function = getattr(self.cu, f"fakecuda_{name}")
            function.restype = result
            function.argtypes = arguments

    def reset(self, devices: int = 1, total_bytes: int = 16 << 30) -> None:
        """As if just loaded, on a machine with such devices. Nothing made before may be used from here on."""
        if self.live().contexts:
            # A test that keeps an exception is a cycle with all it had: what ends later would end another's.
            gc.collect()
        self.cu.fakecuda_reset(devices, total_bytes)

    def fail(self, name: str, nth: int = 1, times: int = 1, code: int = UNKNOWN) -> None:
        """Make the nth call from now on, and `times` in all, do nothing but return `code`."""
        self._known(self.cu.fakecuda_fail(name.encode(), nth, times, code), name)

    def price(self, name: str, fixed_us: float, granule_us: float = 0.0) -> None:
        """Make each call take so long, and longer for each granule that it covers."""
        self._known(self.cu.fakecuda_price(name.encode(), fixed_us, granule_us), name)

    def prices(self, table: Mapping[str, tuple[float, float]]) -> None:
        """Set the price of each name in a table such as A100."""
        for name, (fixed_us, granule_us) in table.items():
            self.price(name, fixed_us, granule_us)

    def calls(self, name: str, thread: int = 0) -> int:
        """How often `name` was called since the last reset, by the thread of that native id or by all."""
        calls = c_uint64()
        self._known(self.cu.fakecuda_calls(name.encode(), thread, byref(calls)), name)
        return calls.value

    def charged(self, thread: int = 0) -> float:
        """Microseconds charged since the last reset, to the thread of that native id or to all."""
        charged: float = self.cu.fakecuda_charged(thread)
        return charged

    def work(self, address: int, size: int, stream: int = 0) -> Work:
        """Work that may touch this range until it ends. `stream`: its handle, or 0 for the default one."""
        number = c_uint64()
        status: int = self.cu.fakecuda_work_begin(stream, address, size, byref(number))
        if status != SUCCESS:
            raise ValueError(f"no work can begin on stream {stream:#x}: error {status}")
        return Work(lambda: self.cu.fakecuda_work_end(number.value))

    def traps(self) -> list[str]:
        """Each unmap under work, and each work on an address that it may not touch."""
        text = ctypes.create_string_buffer(256)
        found: list[str] = []
        while self.cu.fakecuda_trap(len(found), text, len(text)):
            found.append(text.value.decode())
        return found

    def memory(self, total_bytes: int, device: int = 0) -> None:
        """Change what the device has in all, for every process that shares it. After cuInit."""
        if not self.cu.fakecuda_set_total(device, total_bytes):
            raise ValueError(f"no device {device}; call cuInit first")

    def hog(self, size: int, device: int = 0) -> None:
        """Hold so much of the device, in this process, beside what the driver made. After cuInit."""
        if not self.cu.fakecuda_hog(device, size):
            raise ValueError(f"device {device} is not there, or has not {size} bytes; call cuInit first")

    def live(self) -> Live:
        """What exists now."""
        live = _Live()
        self.cu.fakecuda_live(byref(live))
        return Live(**{name: getattr(live, name) for name in Live.__dataclass_fields__})

    def data(self, data: bool) -> None:
        """Without data only the books are kept, which any number of scattered granules fit in."""
        self.cu.fakecuda_set_data(data)

    def fill(self, byte: int | None) -> None:
        """Fill physical memory with a byte when it is created."""
        self.cu.fakecuda_set_fill(-1 if byte is None else byte)

    def _known(self, known: bool, name: str) -> None:
        if not known:
            raise ValueError(f"{name!r} is no entry point of the stand-in; see entry.cpp")


@functools.cache
def load() -> FakeCuda:
    """Load the stand-in into this process, once. Before anything loads the real one."""
    return FakeCuda(build())
