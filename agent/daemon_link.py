"""The leader's link to its daemon: connect, greet, and connect again after a while when the daemon goes."""

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvquota.agent.fork import close_in_children
from kvquota.native import DesiredReader, ObservedWriter, packet

_VERSION = 1
_ANSWER_S = 2.0
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_LONGEST_PATH = 107

_log = logging.getLogger(__name__)


class RefusedError(Exception):
    """The daemon does not take this instance. `code` is one of the protocol's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Standing(NamedTuple):
    """What hello tells: the last revision that a daemon gave (None: none did), and the limit in force."""

    base: int | None
    revision: int
    limit_bytes: int | None


class Session:
    """One connection that a daemon welcomed, with its two segments. Owned by the engine thread."""

    def __init__(self, sock: socket.socket, boot_id: str, fds: list[int], *, takes_bye: bool = False) -> None:
        """Take over `sock` and `fds`: desired, observed, and a host device's record. Raises SegmentError.

        `takes_bye`: whether the daemon knows the packet.
        """
        desired, observed, *record = fds
        try:
            self.desired = DesiredReader(desired)
            self.observed = ObservedWriter(observed)
        except BaseException:
            for fd in record:
                os.close(fd)
            raise
        finally:
            os.close(desired)
            os.close(observed)
        self.record_fd = record[0] if record else None
        self._sock = sock
        self._takes_bye = takes_bye
        self.boot_id = boot_id

    def ring(self) -> None:
        """Have the daemon look at `observed`. Never blocks; that a daemon is gone, the watcher notices."""
        packet.ring(self._sock)

    def say_bye(self) -> None:
        """Have the daemon know that the hang-up to come is meant. Never blocks."""
        if self._takes_bye:
            # A daemon that is gone, or does not read, sees the connection end.
            with suppress(OSError):
                packet.send(self._sock, packet.encode({"kind": "bye"}))

    def close(self) -> None:
        """Hang up and let go of the segments."""
        with suppress(OSError):
            # A child forked from another thread this instant may still hold a copy of the descriptor.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self.desired.close()
        self.observed.close()
        if self.record_fd is not None:
            os.close(self.record_fd)
            self.record_fd = None


@dataclass
class _Attempt:
    """A connection whose answer is awaited until `deadline`."""

    sock: socket.socket
    deadline: float


class DaemonLink:
    """One connection at a time, never blocking. `step` it when `fileno()` is readable or `due()` has come."""

    def __init__(
        self,
        path: Path,
        instance: str,
        engine: str,
        standing: Callable[[], Standing],
        *,
        wakes: bool = True,
    ) -> None:
        """`standing` is asked for each hello, on whatever thread steps the link. `wakes`: see Agent."""
        self._path = str(path)
        self._instance = instance
        self._engine = engine
        self._standing = standing
        self._wakes = wakes
        self._attempt: _Attempt | None = None
        self._sock: socket.socket | None = None  # of the session
        self._retry_at = 0.0
        self._retry_s = _FIRST_RETRY_S

    @property
    def path(self) -> str:
        """Where the daemon should listen."""
        return self._path

    def fileno(self) -> int | None:
        """The descriptor to poll for reading; None while disconnected."""
        sock = self._attempt.sock if self._attempt else self._sock
        return sock.fileno() if sock is not None else None

    def due(self) -> float | None:
        """When to step with nothing readable (CLOCK_MONOTONIC, s); None while connected."""
        if self._attempt:
            return self._attempt.deadline
        return None if self._sock is not None else self._retry_at

    def step(self) -> Session | bool:
        """Do what is due. A new Session, or whether the doorbell rang.

        Raises RefusedError, PacketError or SegmentError for what the daemon answered to hello, OSError where
        there is none; the next attempt is then due after a while.
        """
        if self._sock is not None:
            return self._listen(self._sock)
        try:
            if self._attempt is None:
                self._attempt = self._connect()
                return False
            session = self._answer(self._attempt)
        except (OSError, ValueError, RefusedError):
            self._drop_attempt()
            self._back_off()
            raise
        return session or False

    def close(self) -> None:
        """Give up an attempt. A session's socket is the session's to close."""
        self._drop_attempt()
        self._sock = None

    def _connect(self) -> _Attempt:
        if len(os.fsencode(self._path)) > _LONGEST_PATH:
            raise RefusedError(
                "bad_path",
                f"{self._path!r} is longer than the {_LONGEST_PATH} bytes that a socket's path can have",
            )
        sock = close_in_children(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        )
        try:
            sock.connect(self._path)
            base, revision, limit_bytes = self._standing()
            hello = {
                "kind": "hello",
                "min_version": _VERSION,
                "max_version": _VERSION,
                "instance": self._instance,
                "engine": self._engine,
                "pid_reported": os.getpid(),
                "base": base,
                "revision": revision,
                "limit_bytes": limit_bytes,
                "wakes": self._wakes,
            }
            try:
                packet.send(sock, packet.encode(hello))
            except BrokenPipeError:
                # It refused this user before any hello, and said why: that is read as the answer.
                _log.debug("kvquota: the daemon at %s hung up before hello", self._path)
        except BaseException:
            sock.close()
            raise
        return _Attempt(sock, time.monotonic() + _ANSWER_S)

    def _answer(self, attempt: _Attempt) -> Session | None:
        try:
            answer = packet.receive(attempt.sock, max_fds=3)
        except BlockingIOError:
            if time.monotonic() < attempt.deadline:
                return None
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {_ANSWER_S:.0f} s", self._path) from None
        if answer is None:
            raise ConnectionResetError(errno.ECONNRESET, "the daemon hung up before it answered", self._path)
        session = _welcome(attempt.sock, answer)
        self._attempt = None
        self._sock = attempt.sock
        self._retry_s = _FIRST_RETRY_S
        return session

    def _listen(self, sock: socket.socket) -> bool:
        try:
            while (came := packet.receive(sock)) is not None:
                if came.payload == packet.DOORBELL:
                    continue
                _log.warning(
                    "kvquota: the daemon at %s sent %r, which this agent does not know", self._path, came
                )
            _log.warning("kvquota: lost the daemon at %s: its last limit stays in force", self._path)
        except BlockingIOError:
            return True
        except (OSError, packet.PacketError) as error:
            _log.warning("kvquota: leaving the daemon at %s: %s", self._path, error)
            # The session closes it: the engine thread may be ringing just now.
            sock.shutdown(socket.SHUT_RDWR)
        self._sock = None
        self._back_off()
        return False

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.sock.close()
            self._attempt = None

    def _back_off(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)


def _welcome(sock: socket.socket, answer: packet.Packet) -> Session:
    fds = answer.fds
    try:
        message = packet.decode(answer.payload)
        kind = message["kind"]
        if kind == "refused":
            raise RefusedError(packet.text(message, "code"), packet.text(message, "message"))
        if kind != "welcome":
            raise packet.PacketError(f"an answer to hello of kind {kind!r}: expected welcome or refused")
        version = packet.integer(message, "version")
        if version != _VERSION:
            raise packet.PacketError(f"version {version} in welcome: expected {_VERSION}")
        device = packet.text(message, "device")
        if device not in ("host", "cuda"):
            raise packet.PacketError(f"device {device!r} in welcome: expected host or cuda")
        expected = 3 if device == "host" else 2
        if len(fds) != expected:
            raise packet.PacketError(
                f"{len(fds)} descriptors with welcome: expected {expected} for device {device}"
            )
        boot_id = packet.text(message, "boot_id")
        takes_bye = message.get("bye") is True
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Session(sock, boot_id, fds, takes_bye=takes_bye)
