"""The instances: their specs and their leaders. One event loop owns it all."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from kvquota.daemon import errors, log
from kvquota.daemon.agent_link import AgentLink
from kvquota.daemon.hello import RefusedError, welcome
from kvquota.daemon.near import near_names
from kvquota.daemon.revision import join, revision_to_set
from kvquota.daemon.spec import Spec, name_problem, shorten
from kvquota.daemon.spec_store import SpecStore
from kvquota.daemon.status import view
from kvquota.daemon.subscription import Subscription
from kvquota.v1 import quota_pb2 as pb

MAX_FORGETTABLE = 1024
"""Instances without a connection and without a limit ever set that are still shown; they are on no disk."""


@dataclass
class _Instance:
    spec: Spec
    engine: str = ""
    link: AgentLink | None = None


@dataclass(frozen=True)
class Device:
    """What leaders are told of the device, and the descriptors that they need for it."""

    kind: str
    boot_id: str
    fds: list[int]


@dataclass(frozen=True)
class LimitChange:
    """A limit that somebody wants. `limit_bytes` None: no limit."""

    name: str
    limit_bytes: int | None
    revision: int | None
    expected_revision: int | None
    create: bool
    set_by: str


class Registry:
    """Every instance that is connected, has a spec, or was seen since the daemon started."""

    def __init__(self, store: SpecStore, device: Device) -> None:
        self._store = store
        self._device = device
        self._instances = {name: _Instance(spec) for name, spec in store.load().items()}
        self._subscriptions: set[Subscription] = set()
        self._stopping = False
        # Changes of specs go one by one: an fsync takes long, and the loop serves others meanwhile.
        self._changing = asyncio.Lock()

    def names(self) -> list[str]:
        """Every known name, in order."""
        return sorted(self._instances)

    def knows(self, name: str) -> bool:
        """Whether `name` is known."""
        return name in self._instances

    def view(self, name: str) -> pb.Instance:
        """The instance as it is at this moment. Raises UnknownInstanceError."""
        instance = self._instances.get(name)
        if instance is None:
            raise self._unknown(name)
        report = None if instance.link is None else instance.link.report()
        return view(instance.spec, instance.engine, report)

    async def set_limit(self, change: LimitChange) -> int:
        """Set a limit, durable before it is in force, and return its revision.

        Raises QuotaError, and then nothing changed.
        """
        # A caller that goes away must not leave the disk ahead of what is in force.
        return await asyncio.shield(asyncio.ensure_future(self._set_limit(change)))

    async def settled(self, name: str, revision: int) -> pb.Instance:
        """The instance once `revision` is settled, or at once when no leader is connected.

        Raises SupersededError when another revision takes its place, StoppingError when the daemon stops.
        """
        with self.subscribe(frozenset([name])) as subscription:
            while True:
                now = self.view(name)
                if now.revision != revision:
                    raise errors.SupersededError(
                        f"{name}: revision {revision} was superseded by {now.revision}"
                    )
                if now.settled or not now.connected:
                    return now
                await subscription.changes()

    async def join(self, link: AgentLink) -> None:
        """Take a leader in: settle its limit and hand it its segments.

        Raises RefusedError, or OSError when the leader is gone.
        """
        async with self._changing:
            name = link.hello.instance
            instance = self._instances.get(name) or _Instance(Spec(name))
            if instance.link is not None:
                self._probe(instance.link)
            spec = await self._joined_spec(instance.spec, link)
            # Already on disk, so it stands even if the leader is gone before it hears of it.
            instance.spec, instance.engine = spec, link.hello.engine
            self._instances[name] = instance
            link.welcome(spec, welcome(self._device.boot_id, self._device.kind), self._device.fds)
            instance.link = link
            link.watch(partial(self._publish, name), partial(self._leave, name, link))
        log.info(
            "joined",
            instance=name,
            engine=instance.engine,
            pid=link.peer.pid,
            pid_reported=link.hello.pid_reported,
            revision=spec.revision,
        )
        self._publish(name)

    @contextmanager
    def subscribe(self, names: frozenset[str] | None) -> Iterator[Subscription]:
        """Changes from here on, of `names` or of all."""
        subscription = Subscription(names)
        if self._stopping:
            subscription.stop()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def stop_waiting(self) -> None:
        """End every wait and watch, those to come too: the daemon stops."""
        self._stopping = True
        for subscription in self._subscriptions:
            subscription.stop()

    async def close(self) -> None:
        """Let a change that is being written end, then hang up on every leader."""
        async with self._changing:
            for instance in self._instances.values():
                if instance.link is not None:
                    instance.link.close()
                    instance.link = None

    async def _set_limit(self, change: LimitChange) -> int:
        async with self._changing:
            instance = self._instances.get(change.name)
            if instance is None:
                if not change.create:
                    raise self._unknown(change.name)
                instance = _Instance(Spec(change.name))
            old = instance.spec
            revision = revision_to_set(old, change.limit_bytes, change.revision, change.expected_revision)
            if revision == old.revision:
                self._instances[change.name] = instance
                return revision
            spec = replace(
                old,
                limit_bytes=change.limit_bytes,
                revision=revision,
                set_by=change.set_by,
                set_at_unix_ns=time.time_ns(),
            )
            await asyncio.to_thread(self._store.write, spec)
            instance.spec = spec
            self._instances[change.name] = instance
            if instance.link is not None:
                instance.link.tell(spec)
        _log_limit("limit_set", spec)
        self._publish(change.name)
        return revision

    async def _joined_spec(self, old: Spec, link: AgentLink) -> Spec:
        joined = join(old, link.hello.told)
        if joined.origin == "spec":
            return old
        spec = replace(old, limit_bytes=joined.limit_bytes, revision=joined.revision)
        if joined.origin == "agent":
            spec = replace(spec, set_by="agent", set_at_unix_ns=time.time_ns())
        _log_limit("adopted" if joined.origin == "agent" else joined.origin, spec)
        try:
            await asyncio.to_thread(self._store.write, spec)
        except (errors.StorageError, errors.StorageFullError) as problem:
            # The engine runs under this limit already; it says so again when it joins the next daemon.
            log.error("spec_not_durable", instance=spec.name, revision=spec.revision, reason=problem)
        return spec

    def _probe(self, holder: AgentLink) -> None:
        name = holder.hello.instance
        if holder.alive():
            raise RefusedError(
                "name_in_use",
                f"{name!r} is pid {holder.peer.pid} ({holder.hello.engine}): set another KVQUOTA_INSTANCE",
            )
        self._leave(name, holder, "gone_when_probed")

    def _leave(self, name: str, link: AgentLink, reason: str) -> None:
        instance = self._instances[name]
        if link.said_bye():
            log.info("left", instance=name, pid=link.peer.pid)
        else:
            log.warning("lost", instance=name, pid=link.peer.pid, reason=reason)
        link.close()
        if instance.link is link:
            instance.link = None
        self._publish(name)
        self._forget_some()

    def _forget_some(self) -> None:
        forgettable = [name for name, i in self._instances.items() if i.link is None and i.spec.revision == 0]
        for name in forgettable[:-MAX_FORGETTABLE]:
            del self._instances[name]
            self._publish(name)

    def _publish(self, name: str) -> None:
        for subscription in self._subscriptions:
            subscription.mark(name)

    def _unknown(self, name: str) -> errors.QuotaError:
        near = [] if name_problem(name) else near_names(name, self._instances)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return errors.UnknownInstanceError(f"no instance {shorten(name)} was ever seen{hint}")


def _log_limit(event: str, spec: Spec) -> None:
    fields = {"limit_bytes": spec.limit_bytes, "revision": spec.revision, "set_by": spec.set_by}
    log.info(event, instance=spec.name, **fields)
