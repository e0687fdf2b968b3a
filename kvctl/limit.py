"""`limit`: set or clear the limit of an instance."""

from __future__ import annotations

import re

import click
from kvquota.kvctl import render
from kvquota.kvctl.errors import UnsettledError
from kvquota.kvctl.options import Options, instance_name, output_option
from kvquota.kvctl.sizes import parse_limit

DEFAULT_TIMEOUT_S = 30.0
_MAX_TIMEOUT_S = 86_400.0
_MAX_REVISION = 2**63 - 1


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Taken for an option, `-512M` would be refused as the unknown option `-5`.
        for value in args:
            if re.match(r"-[0-9.]", value):
                raise click.UsageError(f"{value!r} is negative: sizes, revisions and seconds start at 0", ctx)
        return super().parse_args(ctx, args)


def _limit(_: click.Context, __: click.Parameter, value: str) -> int | None:
    try:
        return parse_limit(value)
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None


def _revision(_: click.Context, option: click.Parameter, value: int | None) -> int | None:
    if value is not None and value > _MAX_REVISION:
        raise click.UsageError(f"--{option.name} {value}: write a number up to {_MAX_REVISION}")
    return value


def _seconds(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    # Not a click range: that lets `nan` through.
    if value is not None and not 0 <= value <= _MAX_TIMEOUT_S:
        raise click.UsageError(f"--timeout {value}: write seconds from 0 to {_MAX_TIMEOUT_S:.0f}")
    return value


@click.command(cls=_Command)
@click.argument("name", callback=instance_name)
@click.argument("size", metavar="SIZE|none", callback=_limit)
@click.option("--create", is_flag=True, help="Keep the limit for an engine that was never seen.")
@click.option(
    "--revision", type=int, metavar="N", callback=_revision, help="Set as revision N, above the current one."
)
@click.option(
    "--expect", type=int, metavar="N", callback=_revision, help="Set only if the current revision is N."
)
@click.option("--wait", is_flag=True, help="Return when nothing more will happen by itself.")
@click.option("--timeout", type=float, metavar="S", callback=_seconds, help="Seconds to wait at most (30).")
@output_option
@click.pass_obj
def limit(
    options: Options,
    name: str,
    size: int | None,
    *,
    create: bool,
    revision: int | None,
    expect: int | None,
    wait: bool,
    timeout: float | None,
) -> None:
    """Set the memory limit of instance NAME, or clear it with `none`.

    SIZE is a number of bytes, or a number with a suffix: 512M, 2G, 1.5GiB. Suffixes are binary: 1K, 1KB and
    1KiB are 1024 bytes. A limit of 0 takes away all that can be given up; `none` allows all of the capacity.

    \b
    Exit codes:
      0  set; with --wait also settled, with the reason printed where it is not applied
      1  error
      2  usage
      3  daemon unreachable
      4  conflict or stale revision: somebody else has set the limit
      5  set, but not settled at the time-out
    """
    if revision is not None and expect is not None:
        raise click.UsageError(f"--revision {revision} and --expect {expect} exclude each other: give one")
    if timeout is not None and not wait:
        raise click.UsageError(f"--timeout {timeout:g} is the time-out of --wait: give both or none")
    wait_s = DEFAULT_TIMEOUT_S if timeout is None else timeout
    with options.connect() as client:
        # Loaded with the client: neither is needed for help and mistakes.
        from kvquota.v1.quota_pb2 import SetLimitRequest

        answer = client.set_limit(
            SetLimitRequest(
                name=name,
                limit_bytes=size,
                revision=revision,
                expected_revision=expect,
                create=create,
                wait=wait,
                wait_timeout_ms=round(wait_s * 1000) if wait else None,
                set_by="kvctl",
            )
        )
    if answer.timed_out:
        raise UnsettledError(
            f"set, but not settled after {wait_s:g} s: `kvctl watch {name}` shows how it goes on",
            answer.instance,
        )
    now = answer.instance
    click.echo(render.to_json(render.as_dict(now)) if options.json else render.outcome(now))
