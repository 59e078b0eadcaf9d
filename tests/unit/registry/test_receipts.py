"""Receipts: read strictly, shown, and asked for where a deployment wants nothing that never ran."""

from __future__ import annotations

import msgspec
import pytest
from unit.registry import samples
from unit.registry.fakes import FakeApi

from chord.errors import ReceiptError, SettingsError
from chord.registry import Registry, receipts
from chord.registry.driver import Driver
from chord.registry.loading import Loader
from chord.registry.receipts import DriverVersion, Outcome, Receipt, Receipts
from signing import key_pair, sign


def receipt_of(registry, *names, passed=True, gpu="NVIDIA H200", cases=3):
    programs = registry.programs()
    return Receipt(
        schema=1,
        date="2026-11-30T10:00:00Z",
        gpu=gpu,
        arch="sm_90a",
        driver=DriverVersion(cuda=13000, nvidia="580.82.07"),
        software={"chord": "0.1.0"},
        manifest_sha256=registry.digest,
        sanitizer=None,
        tiny=False,
        checks={"toy": ("everything",)},
        programs={
            name: Outcome(cubin_sha256=programs[name].builds["sm_90a"].cubin_sha256, cases=cases, passed=passed)
            for name in names
        },
    )


def put(folder, receipt, name="one.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(receipts.encode(receipt))
    return folder / name


def requiring(root, **options):
    registry = Registry.open(root, require_receipt=True, **options)
    registry._loader = Loader(Driver(FakeApi()))
    return registry


def test_only_what_ran_is_loaded(root):
    put(root / receipts.FOLDER, receipt_of(Registry.open(root), "toy.many"))
    registry = requiring(root)
    registry.load("toy.many")
    sha256 = registry.programs()["toy.one.t1"].builds["sm_90a"].cubin_sha256
    with pytest.raises(ReceiptError, match=rf"toy.one.t1 for sm_90a: .*a receipt of cubin {sha256}.*never run on hard"):
        registry.load("toy.one.t1")
    with pytest.raises(ReceiptError, match=r"toy.one.t1 for sm_90a"):
        registry.preload("toy")
    assert registry._loader.driver.api.count("cuModuleLoadData") == 1


def test_the_variable_asks_and_the_argument_beats_it(root, monkeypatch):
    monkeypatch.setenv("CHORD_REQUIRE_RECEIPT", "1")
    assert Registry.open(root).require_receipt
    assert not Registry.open(root, require_receipt=False).require_receipt
    monkeypatch.setenv("CHORD_REQUIRE_RECEIPT", "0")
    assert not Registry.open(root).require_receipt
    monkeypatch.setenv("CHORD_REQUIRE_RECEIPT", "yes")
    with pytest.raises(SettingsError, match="CHORD_REQUIRE_RECEIPT is 'yes': expected 0 or 1"):
        Registry.open(root)


def test_receipts_of_a_named_folder_count_beside_the_registrys(root, tmp_path, monkeypatch):
    registry = Registry.open(root)
    own, other = root / receipts.FOLDER, tmp_path / "other"
    put(own, receipt_of(registry, "toy.many"))
    put(other, receipt_of(registry, "toy.one.t1", gpu="NVIDIA H100"))
    monkeypatch.setenv("CHORD_RECEIPTS", str(other))
    registry = requiring(root)
    registry.load("toy.many")
    registry.load("toy.one.t1")
    monkeypatch.setenv("CHORD_RECEIPTS", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="CHORD_RECEIPTS: expected a folder of receipts"):
        Registry.open(root)
    with pytest.raises(SettingsError, match="receipts: expected a folder of receipts"):
        Registry.open(root, receipts=tmp_path / "none")


def test_a_failure_outweighs_a_pass(root):
    registry = Registry.open(root)
    put(root / receipts.FOLDER, receipt_of(registry, "toy.many"))
    put(root / receipts.FOLDER, receipt_of(registry, "toy.many", passed=False, gpu="NVIDIA H100"), "two.json")
    with pytest.raises(ReceiptError, match=r"toy.many for sm_90a: its checks failed on NVIDIA H100 \(.*two.json\)"):
        requiring(root).load("toy.many")
    sha256 = registry.programs()["toy.many"].builds["sm_90a"].cubin_sha256
    assert Registry.open(root).receipts.ran_on(sha256) == ("NVIDIA H100 (FAILED)", "NVIDIA H200")


def test_no_cases_are_no_pass(root):
    put(root / receipts.FOLDER, receipt_of(Registry.open(root), "toy.many", cases=0))
    with pytest.raises(ReceiptError, match=r"toy.many"):
        requiring(root).load("toy.many")


def test_a_receipt_is_about_bytes_and_not_about_names(root, tmp_path):
    """Another cubin under the same name has no receipt; the same cubin in a later manifest has one."""
    registry = Registry.open(root)
    put(root / receipts.FOLDER, receipt_of(registry, "toy.many"))
    later = msgspec.structs.replace(
        registry.manifest, registry=msgspec.structs.replace(registry.manifest.registry, serial=99)
    )
    samples.publish(root, later)
    requiring(root).load("toy.many")
    many = registry.programs()["toy.many"]
    data = samples.compiled(samples.kernel_source("toy_many", body="x[map[0]] = 1;"), "sm_90a")
    build = msgspec.structs.replace(
        many.builds["sm_90a"], cubin_sha256=registry.store.write(data), size_bytes=len(data)
    )
    toy = registry.manifest.operators["toy"]
    changed = msgspec.structs.replace(many, builds=many.builds | {"sm_90a": build})
    toy = msgspec.structs.replace(toy, programs=toy.programs | {"toy.many": changed})
    samples.publish(root, msgspec.structs.replace(registry.manifest, operators={"toy": toy}))
    with pytest.raises(ReceiptError, match="never run on hardware"):
        requiring(root).load("toy.many")


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[" * 200_000, b'{"schema": "1"}', b"null"])
def test_a_file_that_is_no_receipt_is_named(root, data):
    folder = root / receipts.FOLDER
    folder.mkdir(parents=True)
    (folder / "bad.json").write_bytes(data)
    (folder / "notes.txt").write_text("not looked at")
    with pytest.raises(ReceiptError, match=r"bad.json is not a receipt: .*`chord qualify`"):
        requiring(root).load("toy.many")
    Registry.open(root, require_receipt=False).verify()  # nobody asked for receipts


def test_what_cannot_be_read_is_named(root):
    folder = root / receipts.FOLDER
    (folder / "folder.json").mkdir(parents=True)
    with pytest.raises(ReceiptError, match=r"cannot read .*folder.json"):
        Receipts([folder], {}).of("0" * 64)


def test_a_receipt_of_another_schema_says_so(root):
    path = put(root / receipts.FOLDER, receipt_of(Registry.open(root), "toy.many"))
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 2'))
    with pytest.raises(ReceiptError, match=rf"{path} has schema 2, this chord reads 1"):
        Registry.open(root).receipts.of("0" * 64)


def test_a_folder_that_cannot_be_listed_may_hold_a_failure(root, monkeypatch):
    """Taking it for an empty one would let a cubin run whose checks failed."""
    put(root / receipts.FOLDER, receipt_of(Registry.open(root), "toy.many", passed=False))

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(receipts.Path, "iterdir", refuse)
    with pytest.raises(ReceiptError, match=rf"cannot list {root / receipts.FOLDER} \(Permission denied\)"):
        Registry.open(root).receipts.ran_on("0" * 64)


def test_receipts_come_back_as_they_were_written(root):
    made = receipt_of(Registry.open(root), "toy.many", "toy.one.t1")
    assert receipts.decode(receipts.encode(made), "here") == made


def test_where_a_key_is_required_receipts_need_its_signature(root, tmp_path):
    secret, public = key_pair(tmp_path, "ours")
    path = put(root / receipts.FOLDER, receipt_of(Registry.open(root), "toy.many"))
    sign(root, secret)
    with pytest.raises(ReceiptError, match=r"the receipt does not count \(key: .*one.json is not signed"):
        requiring(root, key=public).load("toy.many")
    sha256 = Registry.open(root).programs()["toy.many"].builds["sm_90a"].cubin_sha256
    demanding = Registry.open(root, key=public).receipts
    assert demanding.ran_on(sha256) == ("NVIDIA H200 (not signed by a required key)",)
    assert not demanding.suffices(sha256)
    assert Registry.open(root).receipts.ran_on(sha256) == ("NVIDIA H200",)
    assert Registry.open(root).receipts.suffices(sha256)
    receipts.sign(path, secret)
    requiring(root, key=public).load("toy.many")
    demanding = Registry.open(root, key=public).receipts
    assert (demanding.ran_on(sha256), demanding.suffices(sha256)) == (("NVIDIA H200",), True)
    path.write_bytes(path.read_bytes().replace(b"H200", b"B200"))
    with pytest.raises(ReceiptError, match="it was changed after it was signed"):
        requiring(root, key=public).load("toy.many")
