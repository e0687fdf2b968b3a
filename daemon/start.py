"""Where the installed command starts: the base install has it, but not what it needs."""

import sys


def main() -> int:
    """Run kvquotad; its exit status. Without the `daemon` extra one line says what to install."""
    try:
        from kvquota.daemon import cli
    except ModuleNotFoundError as missing:
        print(f"kvquotad: needs {missing.name}: pip install 'kvquota[daemon]'", file=sys.stderr)
        return 1
    cli.main()
    return 0
