"""The layout of an installed kvquota."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import kvquota.native
import tomllib

ROOT = Path(__file__).parents[1]


def test_a_checkout_called_kvquota_in_the_way_does_not_stand_for_the_package(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for package, folder in _packages().items():
        ignored = shutil.ignore_patterns("__pycache__", "src", "include")
        shutil.copytree(ROOT / folder, site / package, ignore=ignored, dirs_exist_ok=True)
    (extension,) = (path for folder in kvquota.native.__path__ for path in Path(folder).glob("_native*.so"))
    shutil.copy(extension, site / "kvquota/native")
    checkout = tmp_path / "sources" / "kvquota"
    for folder in ("agent", "native"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "__init__.py").write_text("raise ImportError('the checkout, not the package')")

    # Without site there is no editable install, which would find the package first.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import kvquota.agent; print(kvquota.agent.Settings)"],
        cwd=checkout.parent,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def _packages() -> dict[str, str]:
    """Where each package of a wheel comes from."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages: dict[str, str] = settings["tool"]["scikit-build"]["wheel"]["packages"]
    return packages
