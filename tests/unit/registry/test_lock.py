"""Pins and lock files: all that are given must agree with the manifest, and nothing goes back in silence."""

from __future__ import annotations

import msgspec
import pytest
from unit.registry.samples import plain_manifest, publish

from chord._version import __version__
from chord.errors import LockError, PinMismatchError, RollbackError, SettingsError
from chord.registry import Registry, canonical, lock
from chord.registry import schema as s


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "registry"
    folder.mkdir()
    return publish(folder, plain_manifest())


def locked(root, path):
    opened = Registry.open(root, relock=True)
    path.write_bytes(lock.encode(lock.lock_of(opened.manifest, opened.digest)))
    return path


def with_serial(root, serial):
    info = s.RegistryInfo(version=__version__, serial=serial)
    return publish(root, msgspec.structs.replace(plain_manifest(), registry=info))


@pytest.mark.parametrize("how", ["argument", "variable", "beside the manifest"])
def test_a_lock_file_holds_a_registry_to_every_byte(plain, tmp_path, monkeypatch, how):
    path = locked(plain, plain / "chord.lock" if how == "beside the manifest" else tmp_path / "other.lock")
    if how == "variable":
        monkeypatch.setenv("CHORD_LOCK", str(path))
    argument = path if how == "argument" else None
    place = {"argument": "lock", "variable": "CHORD_LOCK"}.get(how, "the registry's folder")
    before = Registry.open(plain, lock=argument)
    with_serial(plain, 8)
    with pytest.raises(PinMismatchError, match=rf"{place}: {path} expects {before.digest}.*`chord lock`") as caught:
        Registry.open(plain, lock=argument)
    assert not isinstance(caught.value, RollbackError)
    assert Registry.open(plain, relock=True).manifest.registry.serial == 8


def test_a_lower_serial_than_the_locked_one_is_a_rollback(plain, tmp_path):
    old = (plain / "manifest.json").read_bytes()
    with_serial(plain, 9)
    path = locked(plain, tmp_path / "chord.lock")
    (plain / "manifest.json").write_bytes(old)
    with pytest.raises(RollbackError, match=r"has serial \d, lock: .* locks serial 9: refused as a rollback"):
        Registry.open(plain, lock=path)


def test_a_rollback_is_refused_whatever_pins_say(plain, tmp_path, monkeypatch):
    old = (plain / "manifest.json").read_bytes()
    with_serial(plain, 9)
    path = locked(plain, tmp_path / "chord.lock")
    (plain / "manifest.json").write_bytes(old)
    monkeypatch.setenv("CHORD_PIN", canonical.digest(old))
    with pytest.raises(RollbackError):
        Registry.open(plain, canonical.digest(old), lock=path)


def test_pin_variable_and_lock_must_all_agree(plain, tmp_path, monkeypatch):
    path = locked(plain, tmp_path / "chord.lock")
    right, wrong = Registry.open(plain).digest, "1" * 64
    monkeypatch.setenv("CHORD_LOCK", str(path))
    monkeypatch.setenv("CHORD_PIN", right)
    assert Registry.open(plain, right).digest == right
    with pytest.raises(PinMismatchError, match=f"pin expects {wrong}"):
        Registry.open(plain, wrong)
    monkeypatch.setenv("CHORD_PIN", wrong)
    with pytest.raises(PinMismatchError, match=f"CHORD_PIN expects {wrong}"):
        Registry.open(plain, right)
    with_serial(plain, 8)
    monkeypatch.setenv("CHORD_PIN", canonical.digest((plain / "manifest.json").read_bytes()))
    with pytest.raises(PinMismatchError, match=f"CHORD_LOCK: {path} expects {right}"):
        Registry.open(plain)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lock: lock["cubins"]["toy.many"].update(sm_90a="f" * 64), "cubins.toy.many"),
        (lambda lock: lock["cubins"].pop("toy.many"), "cubins.toy.many"),
        (lambda lock: lock["registry"].update(serial=1000), "registry"),
        (lambda lock: lock["toolchain"].update(version="12.9.1"), "toolchain"),
    ],
)
def test_an_edited_lock_contradicts_the_manifest_that_it_names(plain, tmp_path, edit, said):
    path = locked(plain, tmp_path / "chord.lock")
    raw = msgspec.json.decode(path.read_bytes())
    edit(raw)
    path.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(LockError, match=f"contradicts the manifest that it names: {said}"):
        Registry.open(plain, lock=path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"<html>", b"\xff", b"[" * 200_000, b'{"lock_version": "1"}', b'{"lock_version": 1, "more": 1}'],
)
def test_what_is_no_lock_file_is_refused(plain, tmp_path, data):
    path = tmp_path / "chord.lock"
    path.write_bytes(data)
    with pytest.raises(LockError, match=rf"lock: {path} is not a lock file: .*`chord lock`"):
        Registry.open(plain, lock=path)


def test_a_lock_file_of_another_version_says_so(plain, tmp_path):
    path = locked(plain, tmp_path / "chord.lock")
    path.write_bytes(path.read_bytes().replace(b'"lock_version": 1', b'"lock_version": 2'))
    with pytest.raises(LockError, match=r"has lock_version 2, this chord reads 1; install the chord that wrote it"):
        Registry.open(plain, lock=path)


def test_a_lock_file_that_is_not_there_is_an_error(plain, tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=r"lock: expected a lock file, cannot read .*No such file"):
        Registry.open(plain, lock=tmp_path / "none")
    monkeypatch.setenv("CHORD_LOCK", str(tmp_path))
    with pytest.raises(SettingsError, match=r"CHORD_LOCK: expected a lock file, cannot read .*directory"):
        Registry.open(plain)
    monkeypatch.setenv("CHORD_LOCK", " ")
    with pytest.raises(SettingsError, match="CHORD_LOCK is empty"):
        Registry.open(plain)
    monkeypatch.delenv("CHORD_LOCK")
    (plain / "chord.lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match=r"the registry's folder: expected a lock file"):
        Registry.open(plain)


def test_equal_locks_have_equal_bytes(plain):
    opened = Registry.open(plain)
    made = lock.lock_of(opened.manifest, opened.digest)
    assert lock.decode(lock.encode(made), "here") == made
    assert lock.encode(made).endswith(b"}\n")
