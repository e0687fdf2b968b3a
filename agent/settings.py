"""What an engine's environment asks of its agent: the `KVQUOTA*` variables."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SOCKET = Path("/run/kvquota/gpu0/agent.sock")
DEFAULT_RESERVE_BYTES = 64 << 20

_SUFFIXES = {None: 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d{1,18})(?:(\.\d{1,9})?\s*([KMGT])(?:i?B)?|\s*B)?", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)


class SettingError(ValueError):
    """A setting that cannot be used. The message names it, its value and what was expected."""


@dataclass(frozen=True)
class Settings:
    """How an agent joins. Bytes are ints; a limit of None is no limit."""

    instance: str
    socket: Path = DEFAULT_SOCKET
    default_limit: int | None = None
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    host_fill: int | None = None

    @staticmethod
    def read(environment: Mapping[str, str]) -> "Settings | None":
        """The settings in `environment`; None where KVQUOTA asks for no agent. Raises SettingError."""
        wanted = environment.get("KVQUOTA", "0")
        if wanted not in ("0", "1", ""):
            raise SettingError(f"KVQUOTA is {wanted!r}: expected 1 (elastic) or 0")
        if wanted != "1":
            return None
        limit = environment.get("KVQUOTA_DEFAULT_LIMIT")
        reserve = environment.get("KVQUOTA_RESERVE_BYTES")
        fill = environment.get("KVQUOTA_HOST_FILL")
        return Settings(
            instance=_instance(environment),
            socket=Path(environment.get("KVQUOTA_AGENT_SOCKET") or DEFAULT_SOCKET),
            default_limit=None if limit in (None, "", "none") else _size("KVQUOTA_DEFAULT_LIMIT", limit),
            reserve_bytes=_size("KVQUOTA_RESERVE_BYTES", reserve) if reserve else DEFAULT_RESERVE_BYTES,
            host_fill=_byte("KVQUOTA_HOST_FILL", fill) if fill else None,
        )

    @staticmethod
    def required(environment: Mapping[str, str]) -> "Settings":
        """As read, for what cannot run without an agent. Raises SettingError."""
        settings = Settings.read(environment)
        if settings is None:
            raise SettingError(
                "KVQUOTA is not 1: expected 1, or the engine's own classes in place of kvquota's"
            )
        return settings


def _instance(environment: Mapping[str, str]) -> str:
    # A host often runs one engine: its name then says which. A second engine there is told to choose its own.
    name = environment.get("KVQUOTA_INSTANCE") or socket.gethostname()
    if not _NAME.fullmatch(name) or ".." in name:
        raise SettingError(
            f"KVQUOTA_INSTANCE is {name!r}: expected 1 to 128 of A-Z a-z 0-9 . _ / -, "
            "starting with a letter or digit, without '..'"
        )
    return name


def _size(variable: str, value: str) -> int:
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise SettingError(f"{variable} is {value!r}: expected bytes, or a size such as 512M or 1.5GiB")
    whole, part, suffix = match.groups()
    scale = 1 << _SUFFIXES[suffix and suffix.upper()]
    size = int(whole) * scale + (int(part[1:]) * scale // 10 ** len(part[1:]) if part else 0)
    if size >= 1 << 63:
        raise SettingError(f"{variable} is {value!r}: expected less than 2^63 bytes")
    return size


def _byte(variable: str, value: str) -> int:
    try:
        byte = int(value, 0)
    except ValueError:
        byte = -1
    if not 0 <= byte <= 255:
        raise SettingError(f"{variable} is {value!r}: expected a byte, 0 to 255 or 0x00 to 0xff")
    return byte
