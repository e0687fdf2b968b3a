"""Specs on a real disk: whole or not there, whatever happens in between."""

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kvquota.daemon.errors import StorageError, StorageFullError
from kvquota.daemon.spec import Spec, name_problem
from kvquota.daemon.spec_store import SpecStore

SPEC = Spec(
    "team/vllm",
    limit_bytes=0,
    revision=3,
    guarantee_bytes=1,
    weight=2,
    cache_bytes=None,
    set_by="me",
    set_at_unix_ns=9,
)


def test_specs_come_back_as_written(tmp_path: Path) -> None:
    store = SpecStore(tmp_path)
    others = [
        Spec("b"),
        Spec("team/vllm/dp1", limit_bytes=5, revision=1),
        Spec("team_vllm"),
        Spec("a.json", revision=2),
    ]
    for spec in [SPEC, *others]:
        store.write(spec)
    assert SpecStore(tmp_path).load() == {spec.name: spec for spec in [SPEC, *others]}


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    store = SpecStore(tmp_path)
    store.write(SPEC)
    store.write(Spec("team/vllm", limit_bytes=None, revision=4))
    assert SpecStore(tmp_path).load() == {"team/vllm": Spec("team/vllm", revision=4)}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "null", "[]", '"x"', "\x00", "[" * 100_000,
        json.dumps({"format": 1}),
        SPEC.to_json().replace('"format": 1', '"format": 2'),
        SPEC.to_json().replace('"revision": 3', '"revision": -3'),
        SPEC.to_json().replace('"revision": 3', '"revision": 3.5'),
        SPEC.to_json().replace('"revision": 3', '"revision": true'),
        SPEC.to_json().replace('"limit_bytes": 0', '"limit_bytes": "0"'),
        SPEC.to_json().replace('"limit_bytes": 0', '"limit_bytes": 9223372036854775808'),
        SPEC.to_json().replace('"weight": 2', '"weight": 2, "speed": 4'),
        SPEC.to_json().replace("team/vllm", "../vllm"),
        SPEC.to_json().replace("team/vllm", "another"),
        SPEC.to_json().replace('"me"', "7"),
    ],
)  # fmt: skip
def test_a_corrupt_file_is_set_aside_and_stops_nothing(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = SpecStore(tmp_path)
    store.write(Spec("b"))
    store.write(SPEC)
    path = tmp_path / "team%2Fvllm.json"
    path.write_text(content)
    assert SpecStore(tmp_path).load() == {"b": Spec("b")}
    assert "spec_set_aside" in caplog.text
    assert "team%2Fvllm.json" in caplog.text
    assert path.with_suffix(".corrupt").read_text() == content
    store.write(SPEC)
    assert SpecStore(tmp_path).load() == {"b": Spec("b"), "team/vllm": SPEC}


def test_bytes_that_are_no_text_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    assert SpecStore(tmp_path).load() == {}


def test_a_write_that_finds_no_room_changes_nothing(tmp_path: Path) -> None:
    store = SpecStore(tmp_path)
    store.write(SPEC)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # SIGXFSZ would end the process; ignored, the write fails as on a full disk.
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(StorageFullError, match="team/vllm"):
            store.write(Spec("team/vllm", limit_bytes=1, revision=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert SpecStore(tmp_path).load() == {"team/vllm": SPEC}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_can_not_be_opened_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SpecStore(tmp_path)
    store.write(SPEC)
    real = os.open

    def no_folder(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, "no descriptor left")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_folder)
    with pytest.raises(StorageError, match="team/vllm"):
        store.write(Spec("team/vllm", limit_bytes=1, revision=4))
    monkeypatch.undo()
    assert SpecStore(tmp_path).load() == {"team/vllm": SPEC}


@pytest.mark.parametrize("old", [SPEC, None])
def test_a_folder_that_can_not_be_synced_gets_its_old_spec_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: Spec | None
) -> None:
    store = SpecStore(tmp_path)
    if old is not None:
        store.write(old)
    real = os.fsync

    def no_folder(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.ENOSPC, "no room for the folder")
        real(fd)

    monkeypatch.setattr(os, "fsync", no_folder)
    with pytest.raises(StorageFullError, match="team/vllm"):
        store.write(Spec("team/vllm", limit_bytes=1, revision=4))
    assert SpecStore(tmp_path).load() == ({} if old is None else {"team/vllm": old})
    assert len(list(tmp_path.iterdir())) == (0 if old is None else 1)
    monkeypatch.undo()
    store.write(Spec("team/vllm", limit_bytes=1, revision=4))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_spec_that_can_not_be_read_is_neither_lost_nor_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()  # as root, nothing else is unreadable
    with pytest.raises(OSError, match=r"a\.json"):
        SpecStore(tmp_path).load()
    assert (tmp_path / "a.json").exists()


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from kvquota.daemon.spec import Spec
from kvquota.daemon.spec_store import SpecStore

step, calls = int(sys.argv[2]), 0

def die_at(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(os, name, call)

for name in ("open", "write", "fsync", "close", "rename"):
    die_at(name)
SpecStore(Path(sys.argv[1])).write(Spec("a", limit_bytes=2, revision=2))
"""


def test_killed_between_any_two_steps_the_spec_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    old, new = Spec("a", limit_bytes=1, revision=1), Spec("a", limit_bytes=2, revision=2)
    found = []
    for step in range(1, 20):
        SpecStore(tmp_path).write(old)
        done = subprocess.run([sys.executable, "-c", KILLED_AT, str(tmp_path), str(step)], check=False)
        found.append(SpecStore(tmp_path).load()["a"])
        assert not list(tmp_path.glob("*.tmp"))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    else:
        pytest.fail("the write never ended by itself")
    assert found[0] == old
    assert found[-1] == new
    assert len(found) > 5
    assert found == sorted(found, key=lambda spec: spec.revision)


@pytest.mark.parametrize("name", ["a", "vllm/dp1", "A.b_c-d/e", "0", "a" * 128])
def test_names_that_are_fine(name: str, tmp_path: Path) -> None:
    assert name_problem(name) is None
    SpecStore(tmp_path).write(Spec(name))
    assert list(SpecStore(tmp_path).load()) == [name]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "/a", "-a", "a b", "a\n", "a" * 129, "ä", "a%2F", "a" + "/" * 127]
)
def test_names_that_are_not(name: str) -> None:
    problem = name_problem(name)
    assert problem is not None
    assert repr(name) in problem


def test_a_spec_file_is_not_for_everyone(tmp_path: Path) -> None:
    SpecStore(tmp_path).write(SPEC)
    (path,) = tmp_path.iterdir()
    assert os.stat(path).st_mode & 0o007 == 0
