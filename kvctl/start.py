"""Where the installed command starts: the base install has it, but not what it needs."""

import sys


def main() -> int:
    """Run kvctl; its exit status. Without the `daemon` extra one line says what to install."""
    try:
        from kvquota.kvctl import cli

        return cli.main()
    except ModuleNotFoundError as missing:
        print(f"kvctl: needs {missing.name}: pip install 'kvquota[daemon]'", file=sys.stderr)
        return 1
