"""The committed code is what the .proto generates."""

from pathlib import Path

PROTO = Path(__file__).parents[2] / "proto"


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    # Here, because an engine's environment, where this module is collected too, has no grpcio-tools.
    from grpc_tools import protoc

    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    assert protoc.main(["", f"-I{PROTO}", *outputs, "kvquota/v1/quota.proto"]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(made) == 3
    for path in made:
        assert (tmp_path / path).read_text() == (PROTO / path).read_text(), f"{path} is old: run make proto"
