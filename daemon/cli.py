"""The command kvquotad."""

import asyncio
import grp
import pwd
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
from kvquota.daemon import log
from kvquota.daemon.daemon import run
from kvquota.daemon.directory import default_runtime_dir, default_state_dir
from kvquota.daemon.errors import StartError
from kvquota.daemon.peer import Admission
from kvquota.daemon.settings import Settings
from kvquota.daemon.spec import INT64_MAX

_SIZE = re.compile(r"([0-9]{1,19})(?:([KMGT])(?:i?B)?)?", re.IGNORECASE | re.ASCII)
_ID = re.compile(r"[0-9]{1,10}", re.ASCII)
_MAX_ID = 2**32 - 2
_FOLDER = click.Path(path_type=Path)
_SHIFT = {None: 0, "K": 10, "M": 20, "G": 30, "T": 40}


def _name(_context: click.Context, _option: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        raise click.BadParameter(f"{value!r}: expected 1 to 64 letters, digits and . _ -, no . _ - first")
    return value


def _size(_context: click.Context, _option: click.Parameter, value: str) -> int:
    match = _SIZE.fullmatch(value)
    size = int(match[1]) << _SHIFT[match[2] and match[2].upper()] if match else 0
    if not 0 < size <= INT64_MAX:
        raise click.BadParameter(f"{value!r}: expected bytes, or a number with K, M, G or T (binary)")
    return size


def _group(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else _gid(value)


def _users(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> frozenset[int]:
    return frozenset(map(_uid, values))


def _groups(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> frozenset[int]:
    return frozenset(map(_gid, values))


def _uid(value: str) -> int:
    return _id(value, "user", lambda: pwd.getpwnam(value).pw_uid)


def _gid(value: str) -> int:
    return _id(value, "group", lambda: grp.getgrnam(value).gr_gid)


def _id(value: str, kind: str, look_up: Callable[[], int]) -> int:
    try:
        number = int(value) if _ID.fullmatch(value) else look_up()
    except KeyError:
        number = -1
    if not 0 <= number <= _MAX_ID:
        raise click.BadParameter(f"there is no {kind} {value!r}")
    return number


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--name", default="gpu0", callback=_name, help="One for each device.  [default: gpu0]")
@click.option("--device", type=click.Choice(["host"]), required=True, help="host: CPU memory.")
@click.option("--capacity", required=True, callback=_size, help="What engines share; 8G is 8 * 2^30 bytes.")
@click.option("--runtime-dir", type=_FOLDER, help="For the sockets.  [default: /run/kvquota/NAME]")
@click.option("--state-dir", type=_FOLDER, help="For the specs.  [default: /var/lib/kvquota/NAME]")
@click.option("--group", callback=_group, help="The group that may use control.sock.")
@click.option("--agent-user", multiple=True, callback=_users, help="A user whose engines may join.")
@click.option("--agent-group", multiple=True, callback=_groups, help="A group whose engines may join.")
@click.version_option(package_name="kvquota", prog_name="kvquotad")
def main(  # noqa: PLR0917
    name: str,
    device: str,
    capacity: int,
    runtime_dir: Path | None,
    state_dir: Path | None,
    group: int | None,
    agent_user: frozenset[int],
    agent_group: frozenset[int],
) -> None:
    """Hold the memory quotas of the engines on one device.

    Engines of the daemon's own user and of root may always join.

    Without root, the folders default to $XDG_RUNTIME_DIR/kvquota/NAME and $XDG_STATE_HOME/kvquota/NAME.
    """
    log.set_up()
    try:
        settings = Settings(
            name=name,
            device=device,
            capacity_bytes=capacity,
            runtime_dir=runtime_dir or default_runtime_dir(name),
            state_dir=state_dir or default_state_dir(name),
            control_gid=group,
            admission=Admission(agent_user, agent_group),
        )
        asyncio.run(run(settings))
    except StartError as problem:
        sys.exit(f"kvquotad: {problem}")
