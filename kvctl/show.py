"""`list` and `status`: how things stand now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from kvquota.kvctl import render
from kvquota.kvctl.options import Options, instance_name, output_option

if TYPE_CHECKING:
    from kvquota.v1.quota_pb2 import Instance


@click.command("list")
@output_option
@click.pass_obj
def list_instances(options: Options) -> None:
    """List every instance that is connected or has a limit kept for it.

    A narrow terminal leaves columns out; `kvctl status NAME` and -o json show everything.
    """
    with options.connect(reads=True) as client:
        _print_all(client.instances(), options)


@click.command()
@click.argument("name", required=False, callback=instance_name)
@output_option
@click.pass_obj
def status(options: Options, name: str | None) -> None:
    """Show one instance in full, or all of them in a table."""
    with options.connect(reads=True) as client:
        if name is None:
            _print_all(client.instances(), options)
            return
        instance = client.instance(name)
    click.echo(render.to_json(render.as_dict(instance)) if options.json else render.card(instance))


def _print_all(instances: list[Instance], options: Options) -> None:
    if options.json:
        click.echo(render.to_json([render.as_dict(instance) for instance in instances]))
    else:
        console = render.console()
        console.print(render.table(instances, console.width))
