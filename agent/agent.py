"""The agent of one engine: what an adapter calls around its scheduling steps."""

import errno
import logging
import select
import time
from collections.abc import Callable, Sequence

from kvquota.agent.balloon import Balloon, BalloonStatistics
from kvquota.agent.contract import Adapter, PageCommand, Rank
from kvquota.agent.daemon_link import DaemonLink, RefusedError, Session, Standing
from kvquota.agent.settings import SettingError, Settings
from kvquota.agent.watcher import Watcher
from kvquota.native import DriverError, Observed
from kvquota.native.status import Reason, Status

_BUSY_NS = 1_000_000
_IDLE_NS = 20_000_000
_JOIN_S = 2.0
_FIRST_ATTACH_S = 0.1
_LAST_ATTACH_S = 60.0

_log = logging.getLogger(__name__)


class Agent:
    """Keeps an engine's KV memory at its limit. Everything is called on the engine thread.

    Each step: begin_step(), scheduling, end_step(), and what end_step returned goes to every rank before the
    step runs. An idle engine that was woken calls poll(), and then makes one step where needs_step says so.
    """

    def __init__(
        self,
        adapter: Adapter,
        ranks: Sequence[Rank],
        *,
        pages: int,
        floor: int,
        settings: Settings,
        wakes: bool = True,
    ) -> None:
        """Join the daemon if there is one, and start the watcher.

        `pages`: all of the address range. `floor`: 1 where page 0 holds the null block, already mapped on
        every rank (ask 1, apply seq 0) and in circulation; else 0. `wakes`: whether the adapter's wake()
        makes an idle engine step; where it does not, the daemon says that limits wait for a step. Raises
        SettingError where the daemon refuses the instance.
        """
        self._adapter = adapter
        self._ranks = tuple(ranks)
        self._standing = Standing(None, 0, None)
        self._link = DaemonLink(
            settings.socket, settings.instance, adapter.engine, lambda: self._standing, wakes=wakes
        )
        self._watcher = Watcher(self._link, ranks, adapter.wake)
        self._inbox = self._watcher.inbox
        self._session: Session | None = None
        self._changed: Callable[[], bool] = _unchanged
        self._pulse: Callable[[int, int, int, int], None] = _no_pulse
        self._unreadable = False
        self._unattached: list[Rank] = []
        self._attach_after = _FIRST_ATTACH_S
        self._attach_at = 0.0
        self._told: tuple[object, ...] = ()
        self._shown = adapter.usage()
        self._due = True
        self._idle = False
        self._alarm_at: float | None = None
        self._wanted = 0
        self._queued = (0, 0)
        self._closed = False
        try:
            session = _join(self._link, settings)
        except BaseException:
            self._link.close()
            raise
        # Only of use without a daemon: one that comes later has its own say, so it is no local change.
        limit = settings.default_limit if session is None else None
        self._standing = Standing(None, 0, limit)
        self._balloon = Balloon(
            adapter, ranks, pages=pages, floor=floor, reserve_bytes=settings.reserve_bytes, limit_bytes=limit
        )
        self._statistics = self._balloon.statistics()
        if session is not None:
            self._enter(session)
        self._balloon.settle()
        self._publish()
        self._log_start(settings)
        self._watcher.start()

    def suspend(self) -> None:
        """The engine's KV cache sleeps: no request is served, every page goes. At the top of a step."""
        self._balloon.suspend()
        self._due = True

    def resume(self) -> None:
        """It is awake again, at the top of a step: pages come as usual, the floor first."""
        self._balloon.resume()
        self._due = True

    def begin_step(self) -> None:
        """At the top of a scheduling step: act on a new limit, take pages that should go."""
        if self._idle and self._adapter.busy():
            self._note_idle(False)
        if self._due or self._inbox or self._changed():
            self._take_in()
            self._balloon.reconcile(_BUSY_NS if self._adapter.busy() else _IDLE_NS)
            self._publish()

    def end_step(self) -> PageCommand | None:
        """After scheduling, before the step is dispatched: what every rank must do first, or None."""
        adapter = self._adapter
        grown = adapter.grown()
        wanted = adapter.wanted()
        command = None
        # While nothing is wanted nobody waits for memory: the engine's counts are asked for only then.
        same = wanted == self._wanted and (not wanted or adapter.counters()[:2] == self._queued)
        if not same or grown or self._due:
            self._wanted = wanted
            command = self._balloon.end_step(grown)
            self._publish()
        # After the books: before, the credit of a page that grew would count beside the page.
        self._shown = pinned, evictable, empty, draining = adapter.usage()
        self._pulse(pinned, evictable, empty + self._statistics.credits, draining)
        return command

    def poll(self) -> None:
        """While the engine is idle, whenever it was woken: read what ranks said, publish. Takes no page."""
        if self._inbox or self._changed():
            self._take_in()
            self._balloon.settle()
            self._publish()

    @property
    def needs_step(self) -> bool:
        """Whether an idle engine should make a step now. False while only ranks or requests are awaited.

        An engine that goes idle asks this before it sleeps: what its last step freed, and which requests
        wait, is published then.
        """
        if not self._idle and not self._adapter.busy():
            self._note_idle(True)
            self._publish()
        elif self._adapter.usage() != self._shown or self._adapter.counters()[:2] != self._queued:
            self._publish()
        needs = self._changed() or self._balloon.can_act
        if needs:
            self._due = True
        return needs

    def grow_now(self, pages: int, timeout: float = 0.005) -> int:
        """Ask for credits and wait a bounded moment, for a running request that would be preempted otherwise.

        Returns how many pages may be put in circulation now; 0 at once where the target allows no growth.
        `timeout`: seconds.
        """
        end = time.monotonic() + timeout
        # The balloon takes in what grew so far: the step's end must send it, whether or not more grows.
        self._due = True
        return self._balloon.allow_now(
            pages, lambda rank, created: rank.wait(created, max(0.0, end - time.monotonic()))
        )

    def ask(self, pages: int) -> int:
        """Ask for credits for `pages` more pages, within the target; those that are there may grow at once.

        Returns how many of all that were asked for are still to come: not created, and not refused. Each of
        them wakes the engine, however it ends. 0 where the target allows no growth or a rank is lost.
        """
        # As for grow_now.
        self._due = True
        return self._balloon.ask(pages)

    @property
    def room(self) -> int:
        """Pages that the target allows beyond those in circulation; 0 where a rank is lost."""
        return self._balloon.room

    @property
    def target_pages(self) -> int:
        """Pages that the limit in force allows, as of the last change of the books."""
        return self._statistics.target_pages

    def statistics(self) -> BalloonStatistics:
        """The books now."""
        return self._balloon.statistics()

    def close(self) -> None:
        """Give credits back, leave daemon and ranks, stop the watcher. Bounded; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._balloon.drop_credits()
        try:
            self._watcher.stop()
        finally:
            self._link.close()
            while self._inbox:
                came = self._inbox.popleft()
                if isinstance(came, Session):
                    came.say_bye()
                    came.close()
            if self._session is not None:
                self._session.say_bye()
            self._leave()
            for rank in self._ranks:
                rank.close()

    def _log_start(self, settings: Settings) -> None:
        books = self._statistics
        _log.info(
            "kvquota: instance %s: %d pages of %d bytes, limit %s, %s",
            settings.instance,
            books.capacity_pages,
            books.page_bytes,
            "none" if books.limit_bytes is None else f"{books.limit_bytes} bytes",
            "without a daemon" if self._session is None else f"with the daemon at {settings.socket}",
        )

    def _note_idle(self, idle: bool) -> None:
        self._idle = idle
        self._balloon.idle(idle)
        # The reserve is another one from here on.
        self._due = True

    def _take_in(self) -> None:
        """Everything that came since the last look."""
        while self._inbox:
            came = self._inbox.popleft()
            if isinstance(came, Session):
                self._enter(came)
        if self._session is not None and self._changed():
            self._read_limit(self._session)
        if self._session is not None and self._unattached and time.monotonic() >= self._attach_at:
            self._attach(self._session)

    def _enter(self, session: Session) -> None:
        """Go over to a new session. What it says is acted on only where it is newer than what was."""
        self._leave()
        self._session = session
        self._changed = session.desired.changed
        self._pulse = session.observed.pulse
        self._told = ()
        self._unattached = [] if session.record_fd is None else list(self._ranks)
        self._attach_after = _FIRST_ATTACH_S
        self._attach(session)
        self._read_limit(session)

    def _attach(self, session: Session) -> None:
        """Have ranks take their memory from the device. One that can't now is tried again."""
        if session.record_fd is None:
            return
        fd = session.record_fd
        self._unattached = [rank for rank in self._unattached if rank.lost is None and not _attach(rank, fd)]
        self._attach_at = time.monotonic() + self._attach_after
        self._attach_after = min(2 * self._attach_after, _LAST_ATTACH_S)

    def _leave(self) -> None:
        self._changed, self._pulse = _unchanged, _no_pulse
        self._unattached = []
        if self._session is not None:
            self._session.close()
            self._session = None

    def _read_limit(self, session: Session) -> None:
        desired, fresh = session.desired.read()
        # A segment that says nonsense is no better than one that can't be read.
        self._unreadable = not fresh or (desired.limit_bytes or 0) < 0
        if self._unreadable:
            return
        if desired.revision > self._balloon.revision:
            self._balloon.set_limit(desired.limit_bytes, desired.revision)
            self._standing = Standing(desired.revision, desired.revision, desired.limit_bytes)
        elif desired.revision < self._balloon.revision:
            _log.warning(
                "kvquota: the daemon says revision %d, and %d is in force: kept",
                desired.revision,
                self._balloon.revision,
            )

    def _publish(self) -> None:
        """After any change of the books: tell the daemon, and see what is left to do."""
        balloon = self._balloon
        self._due = balloon.over or balloon.can_act
        times = [at / 1e9 for at in (balloon.retry_at, balloon.decays_at) if at is not None]
        if self._unattached:
            times.append(self._attach_at)
        alarm_at = min(times, default=None)
        if alarm_at != self._alarm_at:
            self._alarm_at = alarm_at
            self._watcher.alarm(alarm_at)
        self._statistics = statistics = balloon.statistics()
        self._shown = self._adapter.usage()
        counters = self._adapter.counters()
        self._queued = counters[:2]
        if self._session is None:
            return
        observed = Observed()
        for field, value in vars(statistics).items():
            setattr(observed, field, value)
        if (self._unreadable or self._unattached) and statistics.status != Status.DEGRADED:
            observed.status = Status.DEGRADED
            observed.reason = Reason.SEGMENT_UNREADABLE if self._unreadable else Reason.RANK_FAILED
        for field, value in counters._asdict().items():
            setattr(observed, field, value)
        self._session.observed.write(observed)
        told = (observed.status, observed.reason, observed.revision_decided, observed.revision_applied)
        if told != self._told:
            self._told = told
            self._session.ring()


def _attach(rank: Rank, record_fd: int) -> bool:
    try:
        rank.attach(record_fd)
    except (OSError, ValueError, DriverError) as error:
        _log.error("kvquota: %s does not take its memory from the device: %s", rank.name, error)
        return False
    return True


def _unchanged() -> bool:
    return False


def _no_pulse(pinned: int, evictable: int, warm: int, draining: int) -> None:
    """Stands in for a segment while there is no daemon."""


def _join(link: DaemonLink, settings: Settings) -> Session | None:
    """Wait up to 2 s for the daemon's welcome; None where there is none, or it does not answer."""
    end = time.monotonic() + _JOIN_S
    refusal: RefusedError | None = None
    while time.monotonic() < end:
        try:
            came = link.step()
        except RefusedError as error:
            if error.code not in ("name_in_use", "too_many"):
                raise SettingError(
                    f"the daemon at {settings.socket} refuses instance {settings.instance!r}: "
                    f"{error.code}, {error}"
                ) from error
            refusal = error
        except ValueError as error:
            raise SettingError(
                f"KVQUOTA_AGENT_SOCKET is {str(settings.socket)!r}, and what answers there is no daemon "
                f"for this agent: {error}"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                _log.warning("kvquota: no daemon at %s: starting without", settings.socket)
                return None
            if error.errno in (errno.EACCES, errno.EPERM, errno.EPROTOTYPE):
                raise SettingError(
                    f"KVQUOTA_AGENT_SOCKET is {str(settings.socket)!r}: expected a daemon's agent.sock that "
                    f"this user may use, and connecting fails: {error}"
                ) from error
            _log.warning("kvquota: the daemon at %s: %s", settings.socket, error)
        else:
            if isinstance(came, Session):
                return came
        _wait(link, end)
    if refusal is not None and refusal.code == "name_in_use":
        raise SettingError(
            f"KVQUOTA_INSTANCE is {settings.instance!r}, and another engine has that name: {refusal}; "
            "choose another"
        ) from refusal
    why = "does not answer" if refusal is None else f"has no room: {refusal}"
    _log.warning("kvquota: the daemon at %s %s: starting without", settings.socket, why)
    return None


def _wait(link: DaemonLink, end: float) -> None:
    due = link.due()
    until = end if due is None else min(end, due)
    poller = select.poll()
    if (fd := link.fileno()) is not None:
        poller.register(fd, select.POLLIN)
    poller.poll(max(0, int((until - time.monotonic()) * 1000) + 1))
