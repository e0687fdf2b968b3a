"""What a command can end with other than well: a message of one line and an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvquota.v1.quota_pb2 import Instance


class KvctlError(click.ClickException):
    """A command that did not do what it was asked. `instance`: how things stand, where the daemon told."""

    def __init__(self, message: str, instance: Instance | None = None) -> None:
        super().__init__(message)
        self.instance = instance


class CallError(KvctlError):
    """The daemon refused the call."""

    exit_code = 1


class UnreachableError(KvctlError):
    """No daemon answers."""

    exit_code = 3


class ConflictError(KvctlError):
    """Somebody else has set the limit, or will have: a revision is taken, stale or not the expected one."""

    exit_code = 4


class UnsettledError(KvctlError):
    """A wait ended at its time-out."""

    exit_code = 5
