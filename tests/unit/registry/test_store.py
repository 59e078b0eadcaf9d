"""The store: content-addressed, atomic, and closed to anything that is not the expected bytes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time

import pytest
from unit.registry.samples import plain_manifest

from chord.errors import MissingCubinError, VerificationError
from chord.registry.store import Store

DATA = b"0123456789" * 1000
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cubins")


def test_what_is_written_is_read_back(store):
    assert store.listing() == []
    assert store.write(DATA) == SHA
    assert store.write(DATA) == SHA
    assert store.read_verified(SHA, len(DATA)) == DATA
    assert store.listing() == [store.path_of(SHA)]
    assert store.path_of(SHA).name == f"{SHA}.cubin"


def test_writing_repairs_a_damaged_cubin(store):
    store.write(DATA)
    store.path_of(SHA).write_bytes(b"damaged")
    store.write(DATA)
    assert store.read_verified(SHA, len(DATA)) == DATA


def test_a_reader_keeps_working_where_nothing_can_be_written(store):
    store.write(DATA)
    store.path_of(SHA).chmod(0o444)
    store.root.chmod(0o555)
    try:
        assert store.read_verified(SHA, len(DATA)) == DATA
    finally:
        store.root.chmod(0o755)


@pytest.mark.parametrize("name", ["", "abc", "../" + "0" * 61, "0" * 63 + "/", "A" * 64, "0" * 64 + "\n"])
def test_only_a_hash_becomes_a_path(store, name):
    with pytest.raises(ValueError, match=r"is not a SHA-256"):
        store.path_of(name)


def test_a_missing_cubin(store):
    with pytest.raises(MissingCubinError, match=f"{SHA}.cubin: expected 10000 bytes, found no file"):
        store.read_verified(SHA, len(DATA))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected 10000 bytes, found 0: an empty file"),
        (DATA[:-1], "expected 10000 bytes, found 9999: text that begins"),
        (DATA + b"x" * 99, "expected 10000 bytes, found 10099"),
        (DATA[:-1] + b"x", f"expected SHA-256 {SHA}, found [0-9a-f]+: text that begins"),
    ],
)
def test_other_bytes_are_refused(store, data, message):
    store.write(DATA)
    store.path_of(SHA).write_bytes(data)
    with pytest.raises(VerificationError, match=message):
        store.read_verified(SHA, len(DATA))


def test_a_link_out_of_the_store_is_refused(store, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(DATA)
    store.root.mkdir()
    store.path_of(SHA).symlink_to(outside)
    with pytest.raises(VerificationError, match=f"a link out of the store, to {outside}"):
        store.read_verified(SHA, len(DATA))
    store.write(DATA)
    assert not store.path_of(SHA).is_symlink()
    assert store.read_verified(SHA, len(DATA)) == DATA


def test_a_folder_or_a_pipe_is_refused(store):
    store.path_of(SHA).mkdir(parents=True)
    with pytest.raises(VerificationError, match=r"expected a file, found something else"):
        store.read_verified(SHA, len(DATA))
    store.path_of(SHA).rmdir()
    os.mkfifo(store.path_of(SHA))
    with pytest.raises(VerificationError, match=r"expected a file, found something else"):
        store.read_verified(SHA, len(DATA))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_cubin_that_may_not_be_read(store):
    store.write(DATA)
    store.path_of(SHA).chmod(0)
    with pytest.raises(VerificationError, match=r"cannot read it: Permission denied"):
        store.read_verified(SHA, len(DATA))


def test_a_store_that_cannot_be_listed(store, monkeypatch):
    store.write(DATA)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(store.root), "iterdir", refuse)
    with pytest.raises(VerificationError, match=rf"{store.root}: expected a folder of cubins, cannot list it: Perm"):
        store.listing()


def test_a_file_that_is_gone_again_when_its_size_is_told(store, monkeypatch):
    """Another process may replace a file at any time: what was read says how large it was."""
    store.write(DATA)
    store.path_of(SHA).write_bytes(DATA + b"more")
    really = store._read
    monkeypatch.setattr(store, "_read", lambda path, size: (really(path, size), path.unlink())[0])
    with pytest.raises(VerificationError, match=rf"expected {len(DATA)} bytes, found {len(DATA) + 4}"):
        store.read_verified(SHA, len(DATA))


def test_a_failed_write_leaves_nothing(store, monkeypatch):
    def refuse(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"disk full"):
        store.write(DATA)
    assert list(store.root.iterdir()) == []


def test_unlisted_files_are_those_that_the_manifest_does_not_name(store):
    store.write(DATA)
    (store.root / "deadbeef.cubin").write_bytes(b"")
    (store.root / f".{SHA}.0123abcd.tmp").write_bytes(b"left by a killed writer")
    assert [path.name for path in store.unlisted(plain_manifest())] == sorted([f"{SHA}.cubin", "deadbeef.cubin"])


def _write_for_ever(store, first) -> None:
    number = first
    while True:
        store.write(str(number % 20).encode() * 100_000)
        store.path_of(hashlib.sha256(str(number % 20).encode() * 100_000).hexdigest()).unlink(missing_ok=True)
        number += 1


def test_writers_may_be_killed_at_any_time(store):
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_write_for_ever, args=(store, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    time.sleep(0.3)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    for path in store.listing():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name.removesuffix(".cubin")
    assert store.write(DATA) == SHA
