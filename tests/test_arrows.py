"""The import arrows of ARCHITECTURE.md: who may import whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "agent": "agent",
    "daemon": "daemon",
    "kvctl": "kvctl",
    "native": "native",
    "v1": "proto/kvquota/v1",
}
MAY_IMPORT = {
    "agent": {"agent", "native"},
    "daemon": {"daemon", "native", "v1"},
    "kvctl": {"kvctl", "v1"},
    "native": {"native"},
    "v1": {"v1"},
}
# An engine's environment pins some of these, and has none of the others.
NOT_IN_AN_ENGINE = {"grpc", "google", "click", "rich"}
# These an engine brings where it needs them: fine, but not for `import kvquota.agent`.
NOT_AT_IMPORT = {*NOT_IN_AN_ENGINE, "cupy", "torch", "numpy", "vllm", "sglang"}
# Who alone may import it: the adapter for an engine, and the CUDA driver.
OWNERS = {"vllm": "vllm", "sglang": "sglang", "cupy": "cuda", "cupy_backends": "cuda"}


def imports(source: str) -> Iterator[str]:
    """Every module that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(package: str, part: str | None, source: str) -> list[str]:
    """What a file of `package` (of its adapter for an engine, or of its CUDA driver) imports, but may not."""
    found = []
    for name in imports(source):
        top, second, third, fourth = (*name.split("."), "", "", "")[:4]
        if (
            (top == "kvquota" and second not in MAY_IMPORT[package])
            or (top == "kvquota" and third == "engines" and fourth not in ("", part))
            or OWNERS.get(top, part) != part
            or (top in NOT_IN_AN_ENGINE and package in ("agent", "native"))
        ):
            found.append(name)
    return found


def sources() -> list[tuple[str, str | None, Path]]:
    found: list[tuple[str, str | None, Path]] = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).parts
            found.append((package, inside[-2] if len(inside) > 1 else None, path))
    return found


def test_no_file_imports_against_the_arrows() -> None:
    checked = sources()
    assert {package for package, _, _ in checked} == set(FOLDERS)
    found = {
        str(path.relative_to(ROOT)): wrong
        for package, part, path in checked
        if (wrong := offences(package, part, path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("package", "part", "line"),
    [
        ("agent", None, "import kvquota.daemon.spec"),
        ("agent", None, "from kvquota import v1"),
        ("agent", None, "import grpc"),
        ("agent", None, "def late():\n    from google.protobuf import message"),
        ("agent", None, "import vllm"),
        ("agent", None, "from kvquota.agent.engines.vllm import adapter"),
        ("agent", None, "from kvquota.agent.engines import vllm"),
        ("agent", "reference", "from vllm.v1 import request"),
        ("agent", "sglang", "import kvquota.agent.engines.vllm.adapter"),
        ("agent", "vllm", "from cupy.cuda import driver"),
        ("daemon", None, "from kvquota.agent.balloon import Balloon"),
        ("daemon", None, "import kvquota.kvctl"),
        ("kvctl", None, "from kvquota.native import Desired"),
        ("native", None, "from kvquota.agent import contract"),
        ("native", None, "import click"),
        ("v1", None, "from kvquota.daemon import spec"),
    ],
)
def test_an_import_against_the_arrows_is_seen(package: str, part: str | None, line: str) -> None:
    assert offences(package, part, line)


@pytest.mark.parametrize(
    ("package", "part", "line"),
    [
        ("agent", None, "from kvquota.native import packet"),
        ("agent", "vllm", "import vllm\nfrom kvquota.agent.engines.vllm.adapter import VllmAdapter"),
        ("agent", "cuda", "from cupy.cuda import driver"),
        ("daemon", None, "import grpc\nfrom kvquota.v1 import quota_pb2"),
    ],
)
def test_an_import_along_the_arrows_is_not(package: str, part: str | None, line: str) -> None:
    assert offences(package, part, line) == []


def test_importing_the_agent_imports_nothing_that_an_engine_pins() -> None:
    modules = sorted(f"kvquota.agent.{path.stem}" for path in (ROOT / "agent").glob("[!_]*.py"))
    program = f"""
import importlib, sys
for name in ["kvquota.agent", "kvquota.agent.cuda", *{modules}]:
    importlib.import_module(name)
print(*sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    loaded = result.stdout.split()
    assert {"kvquota.agent", "kvquota.native", *modules} <= set(loaded)
    assert {name.split(".")[0] for name in loaded} & NOT_AT_IMPORT == set()
    ours = {name.split(".")[1] for name in loaded if name.startswith("kvquota.")}
    assert ours == {"agent", "native"}
