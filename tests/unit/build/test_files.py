"""Whole files, the lock, and the finished cubins of earlier builds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from chord.build.finished import Finished
from chord.build.lock import exclusive
from chord.registry.files import TEMPORARY, write_atomically

CLOSURE = "c" * 64


def test_write_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", b"one")

    def fail(descriptor: int) -> None:
        assert TEMPORARY.fullmatch(next(p.name for p in tmp_path.iterdir() if p.name != "file"))
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "file", b"two")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"one")]


def test_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    waited: list[bool] = []
    with pytest.raises(RuntimeError), exclusive(tmp_path / "lock", lambda: waited.append(True)):
        raise RuntimeError
    with exclusive(tmp_path / "lock", lambda: waited.append(True)):
        assert not waited


def test_finished_cubins_are_found_by_closure(tmp_path: Path) -> None:
    finished = Finished(tmp_path / "work")
    assert finished.find(CLOSURE) is None
    finished.add(CLOSURE, b"bytes")
    assert finished.find(CLOSURE) == Finished(tmp_path / "work").find(CLOSURE) == b"bytes"


def test_a_closure_has_one_cubin(tmp_path: Path) -> None:
    finished = Finished(tmp_path)
    finished.add(CLOSURE, b"one")
    finished.add(CLOSURE, b"two")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"two"]


@pytest.mark.parametrize("damage", [b"", b"byte", b"other"])
def test_what_is_not_what_its_name_says_is_absent(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / f"{CLOSURE}.{hashlib.sha256(b'bytes').hexdigest()}").write_bytes(damage)
    assert Finished(tmp_path).find(CLOSURE) is None


def test_a_file_that_went_away_is_absent(tmp_path: Path) -> None:
    finished = Finished(tmp_path)
    finished.add(CLOSURE, b"bytes")
    next(tmp_path.iterdir()).unlink()
    assert finished.find(CLOSURE) is None


def test_prune_keeps_what_is_current_and_what_is_not_ours(tmp_path: Path) -> None:
    finished = Finished(tmp_path)
    finished.prune({CLOSURE})
    finished.add(CLOSURE, b"one")
    finished.add("d" * 64, b"two")
    (tmp_path / ".file.0123456789abcdef.tmp").write_bytes(b"left by a killed writer")
    (tmp_path / "README").write_text("not ours")
    finished.prune({CLOSURE})
    assert {path.name[:64] for path in tmp_path.iterdir()} == {CLOSURE, "README"}
