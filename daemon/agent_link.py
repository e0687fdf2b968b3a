"""The link to one connected leader: its connection, its pidfd and its two segments."""

import asyncio
import os
import select
import socket
from collections.abc import Callable

from kvquota.daemon import log
from kvquota.daemon.hello import Hello
from kvquota.daemon.peer import Peer
from kvquota.daemon.spec import Spec
from kvquota.daemon.status import Report
from kvquota.native import Desired, DesiredWriter, ObservedReader, packet

RING_TIMEOUT = 5.0
"""Seconds after which a ring without an answer shows."""
_PACKETS_AT_ONCE = 64
_FIRST_LOOK = 0.01
_LAST_LOOK = 1.0


class AgentLink:
    """Owns `connection` and `pidfd` from here on. Everything that comes from the peer is untrusted."""

    def __init__(self, connection: socket.socket, pidfd: int, peer: Peer, hello: Hello) -> None:
        self.peer = peer
        self.hello = hello
        self._connection = connection
        self._pidfd = pidfd
        self._desired = DesiredWriter()
        self._observed = ObservedReader()
        self._revision = 0
        self._answered = True
        self._said_bye = False
        self._timer: asyncio.TimerHandle | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._odd_packet_logged = False
        self._changed: Callable[[], None] = lambda: None
        self._ended: Callable[[str], None] = lambda _: None

    def welcome(self, spec: Spec, payload: bytes, device_fds: list[int]) -> None:
        """Hand over the segments, with `spec` in force. Raises OSError when the peer is gone."""
        self._write(spec)
        packet.send(self._connection, payload, [self._desired.fileno(), self._observed.fileno(), *device_fds])

    def watch(self, changed: Callable[[], None], ended: Callable[[str], None]) -> None:
        """Listen from here on: `changed` for news, `ended`, once, with the reason, when it is gone."""
        self._changed = changed
        self._ended = ended
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, self._receive)
        loop.add_reader(self._pidfd, self._ended, "process_ended")
        self._await_answer()

    def tell(self, spec: Spec) -> None:
        """Put `spec` in force and ring. Never blocks."""
        self._write(spec)
        # A peer that is gone is told by its connection, where it is handled.
        packet.ring(self._connection)
        self._await_answer()

    def report(self) -> Report:
        """What the leader's segment says now."""
        observed, fresh = self._observed.read()
        return Report(self.peer.pid, observed, fresh, self._answered, self.hello.wakes)

    def alive(self) -> bool:
        """Whether the leader is there at this very moment."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def said_bye(self) -> bool:
        """Whether the leader said that it leaves. Of one that has ended, what was not read yet counts too."""
        self._take_packets()
        return self._said_bye

    def close(self) -> None:
        """Hang up and let go of everything."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._connection)
        loop.remove_reader(self._pidfd)
        for timer in (self._timer, self._look_again):
            if timer is not None:
                timer.cancel()
        self._connection.close()
        os.close(self._pidfd)
        self._desired.close()
        self._observed.close()

    def _write(self, spec: Spec) -> None:
        self._desired.write(
            Desired(
                revision=spec.revision,
                limit_bytes=spec.limit_bytes,
                guarantee_bytes=spec.guarantee_bytes,
                cache_bytes=spec.cache_bytes,
            )
        )
        self._revision = spec.revision

    def _receive(self) -> None:
        if reason := self._take_packets():
            self._ended(reason)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._answered = True
        # A ring may be for something else: the limit is taken up when the report says so.
        self._await_answer()
        self._look(_FIRST_LOOK)

    def _take_packets(self) -> str | None:
        """Take what the leader sent: however many doorbells, they are one change. Why it is over, or None."""
        try:
            for _ in range(_PACKETS_AT_ONCE):
                received = packet.receive(self._connection)
                if received is None:
                    return "hung_up"
                if received.payload != packet.DOORBELL:
                    self._hear(packet.decode(received.payload)["kind"])
        except BlockingIOError:
            pass
        except packet.PacketError as problem:
            return f"bad packet: {problem}"
        except OSError as problem:
            return f"connection failed: {problem.strerror}"
        return None

    def _look(self, pause: float) -> None:
        """Pass the news on; again in `pause` seconds where a write was under way: nobody rings at its end."""
        if self._look_again is not None:
            self._look_again.cancel()
        _, fresh = self._observed.read()
        again = not fresh and pause <= _LAST_LOOK
        loop = asyncio.get_running_loop()
        self._look_again = loop.call_later(pause, self._look, 2 * pause) if again else None
        self._changed()

    def _hear(self, kind: str) -> None:
        if kind == "bye":
            self._said_bye = True
        elif not self._odd_packet_logged:
            # Once a link: a leader that repeats itself must not fill the log.
            self._odd_packet_logged = True
            log.warning("packet_refused", instance=self.hello.instance, reason=f"unknown kind {kind!r}")

    def _await_answer(self) -> None:
        # Where an earlier ring waits for its answer, that one's time counts.
        if self._timer is None and self._answered and not self._taken_up():
            self._timer = asyncio.get_running_loop().call_later(RING_TIMEOUT, self._unanswered)

    def _taken_up(self) -> bool:
        observed, _ = self._observed.read()
        return observed.revision_decided >= self._revision

    def _unanswered(self) -> None:
        self._timer = None
        if not self._taken_up():
            self._answered = False
            log.warning("ring_unanswered", instance=self.hello.instance, revision=self._revision)
            self._changed()
