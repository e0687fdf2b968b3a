"""The agent protocol's packets, as the daemon reads and writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvquota.daemon.revision import MAX_STEP, Told
from kvquota.daemon.spec import MAX_REVISION, name_problem
from kvquota.native import packet

VERSION = 1
_MAX_ENGINE = 128


class RefusedError(Exception):
    """An agent that is not let in. `code` is for its program, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Hello:
    """What a leader says of itself. Checked, but not to be trusted."""

    instance: str
    engine: str
    pid_reported: int
    """In the leader's own namespace, which may be a container's: only for the log."""
    told: Told
    wakes: bool
    """Whether an idle engine can be woken for a step. One that can't acts when somebody steps it."""


def read_hello(payload: bytes) -> Hello:
    """The hello in a connection's first packet. Raises RefusedError."""
    try:
        message = packet.decode(payload)
        if message["kind"] != "hello":
            raise RefusedError("bad_hello", f"a first packet of kind {message['kind']!r}: expected 'hello'")
        _check_version(packet.integer(message, "min_version"), packet.integer(message, "max_version"))
        return _hello(message)
    except packet.PacketError as problem:
        raise RefusedError("bad_hello", str(problem)) from problem


def welcome(boot_id: str, device: str) -> bytes:
    """The packet that carries the segments' descriptors."""
    message = {"kind": "welcome", "version": VERSION, "boot_id": boot_id, "device": device, "bye": True}
    return packet.encode(message)


def refused(refusal: RefusedError) -> bytes:
    """The packet before the daemon hangs up."""
    return packet.encode({"kind": "refused", "code": refusal.code, "message": str(refusal)[:1000]})


def _check_version(least: int, most: int) -> None:
    if not least <= VERSION <= most:
        raise RefusedError(
            "version", f"this daemon speaks version {VERSION}, the agent {least} to {most}: update the older"
        )


def _hello(message: Mapping[str, Any]) -> Hello:
    instance = packet.text(message, "instance")
    if problem := name_problem(instance):
        raise RefusedError("bad_hello", problem)
    engine = packet.text(message, "engine")
    if len(engine) > _MAX_ENGINE or not engine.isprintable():
        raise RefusedError(
            "bad_hello", f"engine is {engine!r}: expected 0 to {_MAX_ENGINE} printable letters"
        )
    base = packet.optional_integer(message, "base")
    revision = packet.integer(message, "revision")
    least, most = base or 0, MAX_REVISION - MAX_STEP
    if not least <= revision <= most:
        raise RefusedError("bad_hello", f"revision is {revision}: expected {least} (its base) to {most}")
    wakes = message.get("wakes", True)
    if not isinstance(wakes, bool):
        raise RefusedError("bad_hello", f"wakes is {wakes!r}: expected true or false")
    pid = packet.integer(message, "pid_reported")
    told = Told(base, revision, packet.optional_integer(message, "limit_bytes"))
    return Hello(instance, engine, pid, told, wakes)
