"""The base install has the commands, but not what they need: they say what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["kvctl", "kvquotad"])
@pytest.mark.parametrize("package", ["click", "grpc"])
def test_a_command_without_its_packages_names_the_extra(command: str, package: str) -> None:
    module = {"kvctl": "kvctl", "kvquotad": "daemon"}[command]
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = [{command!r}, 'list']; "
        f"from kvquota.{module}.start import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install 'kvquota[daemon]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
