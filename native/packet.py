"""JSON packets over SOCK_SEQPACKET: between an agent and its daemon, and between a leader and its ranks."""

import array
import json
import math
import os
import reprlib
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

MAX_BYTES = 4096
DOORBELL = b"!"
INT64_MAX = 2**63 - 1


class PacketError(ValueError):
    """A packet that breaks the protocol; the message says how. Don't trust its sender further."""


class Packet(NamedTuple):
    """One packet. The descriptors are the receiver's to close."""

    payload: bytes
    fds: list[int]


def send(sock: socket.socket, payload: bytes, fds: Iterable[int] = ()) -> None:
    """Send one packet, whole or not at all.

    Raises PacketError for a payload that is empty or over MAX_BYTES, and what `sendmsg` raises:
    BlockingIOError when the peer does not read, OSError when it is gone.
    """
    if not 0 < len(payload) <= MAX_BYTES:
        raise PacketError(f"a packet of {len(payload)} bytes: expected 1 to {MAX_BYTES}")
    numbers = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else []
    sock.sendmsg([payload], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, max_fds: int = 0) -> Packet | None:
    """Receive one packet; None when the peer is gone (an empty packet looks the same, so nobody sends one).

    Raises PacketError for a packet over MAX_BYTES or with more than `max_fds` descriptors (all closed), and
    what `recvmsg` raises: BlockingIOError on a non-blocking socket with nothing there.
    """
    # CMSG_LEN, not CMSG_SPACE: its padding would leave room for one descriptor more.
    space = socket.CMSG_LEN(max_fds * array.array("i").itemsize) if max_fds else 0
    try:
        payload, ancillary, flags, _ = sock.recvmsg(MAX_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the peer went without reading what it had been sent
        return None
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    problem = None
    if flags & socket.MSG_TRUNC:
        problem = f"a packet of more than {MAX_BYTES} bytes"
    elif flags & socket.MSG_CTRUNC:
        problem = f"a packet with more than {max_fds} descriptors"
    elif fds and not payload:
        problem = "descriptors without a payload"
    if problem is not None:
        for fd in fds:
            os.close(fd)
        raise PacketError(problem)
    return Packet(payload, list(fds)) if payload else None


def ring(sock: socket.socket) -> bool:
    """Ring the peer's doorbell. Never blocks. False when the peer is gone.

    A full queue counts as rung: the peer has packets to wake up for.
    """
    try:
        sock.send(DOORBELL, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return True


def encode(message: Mapping[str, object]) -> bytes:
    """Make a message a payload. Raises PacketError where it is not plain JSON or over MAX_BYTES."""
    try:
        payload = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PacketError(f"a message that is not plain JSON: {error}") from error
    if len(payload) > MAX_BYTES:
        raise PacketError(f"a message of {len(payload)} bytes: expected at most {MAX_BYTES}")
    return payload


def decode(payload: bytes) -> dict[str, Any]:
    """Make a payload a message: a JSON object with a string `kind`. Raises PacketError for anything else."""
    try:
        message = json.loads(
            payload.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except RecursionError as error:
        raise PacketError("a message nested too deeply") from error
    except ValueError as error:
        raise PacketError(f"not a JSON message: {error}") from error
    if not isinstance(message, dict):
        raise PacketError(f"a message that is a JSON {type(message).__name__}: expected an object")
    text(message, "kind")
    return message


def text(message: Mapping[str, Any], key: str) -> str:
    """The field `key`, which must be a string that can be encoded. Raises PacketError."""
    value = message.get(key)
    if not isinstance(value, str):
        raise PacketError(f"{key} is {reprlib.repr(value)}: expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PacketError(f"{key} is {reprlib.repr(value)}: it holds half a character") from error
    return value


def integer(message: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """The field `key`, which must be an integer of at most 63 bits, from `minimum` up. Raises PacketError."""
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= INT64_MAX:
        shown = reprlib.repr(value)
        raise PacketError(f"{key} is {shown}: expected an integer from {minimum} to {INT64_MAX}")
    return value


def optional_integer(message: Mapping[str, Any], key: str, minimum: int = 0) -> int | None:
    """As `integer`, but None where the field is null or absent."""
    return None if message.get(key) is None else integer(message, key, minimum)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key appears twice among {reprlib.repr([key for key, _ in pairs])}")
    return found


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a finite number")
