"""The agent's one thread: waits for what daemon and ranks say, queues it, and wakes the engine thread."""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvquota.agent.contract import Rank
from kvquota.agent.daemon_link import DaemonLink, RefusedError, Session

_JOIN_S = 2.0

_log = logging.getLogger(__name__)


class Watcher:
    """Waits on every descriptor of the agent with no time-out of its own, except while there is no daemon.

    `inbox` is for the engine thread: new sessions, and True for anything else that is worth a look.
    """

    def __init__(self, link: DaemonLink, ranks: Sequence[Rank], wake: Callable[[], None]) -> None:
        self.inbox: deque[Session | bool] = deque()
        self._link = link
        self._ranks = ranks
        self._wake = wake
        self._alarm: float | None = None
        self._stopping = False
        self._complaint = ""
        self._event = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; a stopped watcher can be started again. Raises RuntimeError where it runs."""
        if self._thread is not None:
            raise RuntimeError("the watcher runs already")
        self._stopping = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvquota-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; may be called twice. Raises TimeoutError where it does not end within 2 s."""
        if self._thread is None:
            return
        self._stopping = True
        os.eventfd_write(self._event, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the watcher did not stop within {_JOIN_S:.0f} s")
        self._thread = None
        os.close(self._event)
        self._event = -1

    def alarm(self, at: float | None) -> None:
        """Have the engine thread look again at `at` (CLOCK_MONOTONIC, s). Only the latest alarm counts.

        None: not at all, so far.
        """
        self._alarm = at
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def _run(self) -> None:
        ranks = list(self._ranks)
        while not self._stopping:
            ready = self._poll(ranks)
            if self._event in ready:
                os.eventfd_read(self._event)
            came = [rank for rank in ranks if rank.fileno() in ready]
            ranks = [rank for rank in ranks if rank not in came or rank.ready()]
            looks = bool(came)
            if self._alarm is not None and time.monotonic() >= self._alarm:
                self._alarm = None
                looks = True
            due = self._link.due()
            if self._link.fileno() in ready or (due is not None and time.monotonic() >= due):
                looks = self._step_link() or looks
            if looks:
                self.inbox.append(True)
                self._wake_engine()

    def _wake_engine(self) -> None:
        try:
            self._wake()
        except Exception:
            # An engine's fault, and no reason to be deaf to the next limit.
            _log.exception("kvquota: the engine could not be woken; it acts at its next step")

    def _poll(self, ranks: Sequence[Rank]) -> set[int]:
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        for rank in ranks:
            poller.register(rank.fileno(), select.POLLIN)
        if (link := self._link.fileno()) is not None:
            poller.register(link, select.POLLIN)
        times = [at for at in (self._alarm, self._link.due()) if at is not None]
        # Rounded up: a millisecond early would be one turn for nothing.
        timeout = max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None
        return {fd for fd, _ in poller.poll(timeout)}

    def _step_link(self) -> bool:
        try:
            came = self._link.step()
        except (OSError, ValueError, RefusedError) as error:
            complaint = f"{type(error).__name__}: {error}"
            # That none is there was said when it was lost, or at the start.
            absent = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
            if complaint != self._complaint:
                level = logging.DEBUG if absent else logging.WARNING
                _log.log(level, "kvquota: not with the daemon at %s: %s", self._link.path, error)
            self._complaint = complaint
            return False
        if isinstance(came, Session):
            self._complaint = ""
            _log.info("kvquota: found the daemon at %s, boot %s", self._link.path, came.boot_id)
            self.inbox.append(came)
            return True
        return came
