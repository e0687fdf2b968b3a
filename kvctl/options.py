"""What holds for every command: which daemon, and in which form the answer is printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvquota.kvctl.client import Client

Function = TypeVar("Function", bound=Callable[..., Any])
Name = TypeVar("Name", str, None, tuple[str, ...])

_MAX_PATH = 107
"""Bytes that the address of a Unix socket holds."""


@dataclass
class Options:
    """`address`: `unix:PATH`, or None for the daemon of the first GPU. `output`: `table` or `json`."""

    address: str | None = None
    output: str = "table"

    @property
    def json(self) -> bool:
        """Whether the answer is for a program."""
        return self.output == "json"

    def connect(self, *, reads: bool = False) -> Client:
        """A client of the daemon. Raises click.UsageError for an address that can't be one.

        `reads`: it sets nothing, so the read.sock beside a control.sock that this user may not use will do.
        """
        # gRPC takes as long to import as all the rest; help and mistakes don't need it.
        from kvquota.kvctl.client import Client

        path = _path(self.address) if self.address else default_path()
        return Client(_read_path(path) if reads else path)


def default_path() -> str:
    """The system's socket of gpu0 where there is one, else the user's own."""
    system = "/run/kvquota/gpu0/control.sock"
    if not os.path.exists(system) and (folder := os.environ.get("XDG_RUNTIME_DIR")):
        user = f"{folder}/kvquota/gpu0/control.sock"
        if os.path.exists(user):
            return user
    return system


def _read_path(path: str) -> str:
    folder, name = os.path.split(path)
    other = os.path.join(folder, "read.sock")
    if name == "control.sock" and os.path.exists(other) and os.path.exists(path):
        # Who may write to a socket may connect to it.
        return path if os.access(path, os.W_OK, effective_ids=True) else other
    return path


def output_option(function: Function) -> Function:
    """Take `-o` before or after the command's name."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        expose_value=False,
        callback=_remember_output,
        help="For people (table, the default) or for programs.",
    )(function)


def instance_name(_: click.Context, __: click.Parameter, value: Name) -> Name:
    """Refuse a name that no message can carry; the daemon judges all others."""
    for name in value if isinstance(value, tuple) else (value or "",):
        if not name.isprintable():
            raise click.UsageError(f"{name!r} is no instance's name: `kvctl list` shows them all")
    return value


def _remember_output(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.ensure_object(Options).output = value


def _path(address: str) -> str:
    path = address.removeprefix("unix:")
    if path == address or not path or not path.isprintable():
        raise click.UsageError(f"{address!r} is no address: write unix:PATH, the path of a control.sock")
    if path.startswith("//"):
        path = path[2:]
    if len(os.fsencode(path)) > _MAX_PATH:
        raise click.UsageError(
            f"{path} is too long for a socket, which takes {_MAX_PATH} bytes: use a shorter one"
        )
    return path
