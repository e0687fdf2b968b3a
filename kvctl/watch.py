"""`watch`: changes as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

import click
from kvquota.kvctl import render
from kvquota.kvctl.options import Options, instance_name, output_option

if TYPE_CHECKING:
    from kvquota.v1.quota_pb2 import Instance, WatchResponse


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", callback=instance_name)
@output_option
@click.pass_obj
def watch(options: Options, names: tuple[str, ...]) -> None:
    """Print the state of the named instances, or of all, and then every change, until Ctrl-C.

    With -o json, an object a line: an instance, or {"name": NAME, "removed": true}.
    """
    seen: dict[str, Instance] = {}
    with suppress(KeyboardInterrupt), options.connect(reads=True) as client:
        for response in client.watch(list(names)):
            if not seen and response.snapshot:
                _say_who_is_missing(names, response)
            for name, instance in _changes(response, seen):
                click.echo(_json(name, instance) if options.json else _line(name, instance))


def _say_who_is_missing(names: tuple[str, ...], response: WatchResponse) -> None:
    present = {instance.name for instance in response.instances}
    for name in dict.fromkeys(names):
        if name not in present:
            click.echo(f"kvctl: no instance {name!r} yet: waiting for it", err=True)


def _changes(response: WatchResponse, seen: dict[str, Instance]) -> Iterator[tuple[str, Instance | None]]:
    """What `response` says that `seen` does not know, which is brought up to date. None: no longer there."""
    present = {instance.name for instance in response.instances}
    gone = [name for name in seen if name not in present] if response.snapshot else response.removed
    for name in gone:
        if seen.pop(name, None) is not None:
            yield name, None
    for instance in response.instances:
        if seen.get(instance.name) != instance:
            seen[instance.name] = instance
            yield instance.name, instance


def _json(name: str, instance: Instance | None) -> str:
    value = {"name": name, "removed": True} if instance is None else render.as_dict(instance)
    return render.to_json(value, indent=None)


def _line(name: str, instance: Instance | None) -> str:
    return f"{datetime.now():%H:%M:%S} {f'{name}: removed' if instance is None else render.change(instance)}"
