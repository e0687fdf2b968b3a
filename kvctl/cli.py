"""The console script: the commands, and the one line on stderr when one fails."""

import os
import sys

import click
from kvquota.kvctl import render
from kvquota.kvctl.errors import KvctlError
from kvquota.kvctl.limit import limit
from kvquota.kvctl.options import Options, output_option
from kvquota.kvctl.show import list_instances, status
from kvquota.kvctl.watch import watch


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--daemon",
    metavar="unix:PATH",
    envvar="KVQUOTA_DAEMON",
    show_envvar=True,
    help="The daemon's control.sock; by default that of gpu0, the system's or else the user's own.",
)
@output_option
@click.version_option(package_name="kvquota")
@click.pass_context
def cli(context: click.Context, daemon: str | None) -> None:
    """See and set how much GPU memory each LLM engine's KV cache may take."""
    context.ensure_object(Options).address = daemon


for command in (list_instances, status, limit, watch):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> int:
    """Run kvctl with `arguments`, by default those of the process; the exit code."""
    if sys.stdout is None:
        # Closed by the caller, who wants no answer. Its number must not become that of a socket.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
    try:
        code = _run(arguments, Options())
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. Python would try again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"the answer can't be written: {error.strerror}", 1)
    return code


def _run(arguments: list[str] | None, options: Options) -> int:
    try:
        code = cli.main(arguments, "kvctl", obj=options, standalone_mode=False)
    except click.ClickException as error:
        return _fail(error, options)
    except click.Abort:
        return _complain("interrupted; what was sent to the daemon stands", 130)
    # Of a command it is what that returned, which is nothing; of --help and the like it is an exit code.
    return code if isinstance(code, int) else 0


def _fail(error: click.ClickException, options: Options) -> int:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
    elif isinstance(error, KvctlError) and error.instance is not None:
        message = f"{message}; now {render.line(error.instance)}"
        if options.json:
            click.echo(render.to_json(render.as_dict(error.instance)))
    return _complain(message, error.exit_code)


def _complain(message: str, code: int) -> int:
    click.echo(f"kvctl: {' '.join(message.split())}", err=True)
    return code
