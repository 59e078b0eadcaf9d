"""Tampering, as a table: whatever is wrong with a cubin is found before the driver sees it."""

from __future__ import annotations

import re

import msgspec
import pytest
from unit.registry import samples
from unit.registry.fakes import FakeApi
from unit.registry.test_cubin import LFS_POINTER

from chord import _settings
from chord.errors import MissingCubinError, VerificationError
from chord.registry import Registry
from chord.registry.store import Store

PROBLEM = {"width": 896, "ways": 16, "num_tokens": 5, "block_m": 8}
X86 = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\x3e\0" + bytes(1000)


def path_of(registry, name: str, arch: str):
    return registry.store.path_of(registry.manifest.operators["toy"].programs[name].builds[arch].cubin_sha256)


def test_a_good_store_verifies(root):
    report = Registry.open(root).verify()
    assert report.ok
    assert (report.checked, report.findings) == (6, ())


def test_r02_completeness_comes_from_the_manifest(root):
    registry = Registry.open(root)
    path_of(registry, "toy.many", "sm_90a").unlink()
    truncated = path_of(registry, "toy.many", "sm_100a")
    truncated.write_bytes(truncated.read_bytes()[:-100])
    (registry.store.root / "deadbeef.cubin").write_bytes(b"x")
    report = registry.verify()
    assert not report.ok
    assert {kind: report.count(kind) for kind in ("missing", "mismatch", "unlisted")} == {
        "missing": 1,
        "mismatch": 1,
        "unlisted": 1,
    }
    by_kind = {finding.kind: finding for finding in report.findings}
    assert (by_kind["missing"].program, by_kind["missing"].arch) == ("toy.many", "sm_90a")
    assert by_kind["mismatch"].path == truncated
    assert by_kind["unlisted"].path.name == "deadbeef.cubin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "found 0: an empty file"),
        (lambda data: LFS_POINTER, "found 130: a Git LFS pointer"),
        (lambda data: b"<html>404</html>", "found 16: an HTML page"),
        (lambda data: X86, "found 1020: an ELF for x86-64, not for CUDA"),
        (lambda data: data[:-1], "a truncated or damaged CUDA ELF"),
        (lambda data: data[:1000], "found 1000: a truncated or damaged CUDA ELF"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "expected SHA-256 .* found .*: a CUDA ELF for sm_90a"),
        (lambda data: data[:2000] + bytes([data[2000] ^ 1]) + data[2001:], "expected SHA-256"),
    ],
)
def test_r03_the_driver_never_sees_other_bytes(root, change, message):
    api = FakeApi()
    registry = samples.opened(root, api)
    path = path_of(registry, "toy.many", "sm_90a")
    path.write_bytes(change(path.read_bytes()))
    selection = registry.lookup("toy", "sm_90a", PROBLEM)
    with pytest.raises(VerificationError, match=f"toy.many for sm_90a: {path}: .*{message}"):
        registry.load(selection)
    assert api.count("cuModuleLoadData") == 0
    assert registry.verify().count("mismatch") == 1


def test_a_missing_cubin(root, api):
    registry = samples.opened(root, api)
    path = path_of(registry, "toy.many", "sm_90a")
    path.unlink()
    with pytest.raises(MissingCubinError, match=f"toy.many for sm_90a: {path}: expected [0-9]+ bytes, found no file"):
        registry.load("toy.many")
    assert api.count("cuModuleLoadData") == 0


def with_cubin(root, name: str, arch: str, data: bytes) -> Registry:
    """The registry again, its manifest naming other bytes for one build: size and hash are right."""
    registry = Registry.open(root)
    sha256 = registry.store.write(data)
    toy = registry.manifest.operators["toy"]
    old = toy.programs[name]
    build = msgspec.structs.replace(old.builds[arch], cubin_sha256=sha256, size_bytes=len(data))
    changed = msgspec.structs.replace(old, builds=old.builds | {arch: build})
    toy = msgspec.structs.replace(toy, programs=toy.programs | {name: changed})
    samples.publish(root, msgspec.structs.replace(registry.manifest, operators={"toy": toy}))
    return samples.opened(root, FakeApi())


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90", "sm_103a"])
def test_r07_a_cubin_of_another_architecture_under_the_right_hash(root, arch):
    registry = with_cubin(root, "toy.many", "sm_90a", samples.compiled(samples.kernel_source("toy_many"), arch))
    with pytest.raises(VerificationError, match=f"expected a cubin for sm_90a, found one for {arch}"):
        registry.load("toy.many")
    assert registry.verify().count("mismatch") == 1


def test_a_cubin_without_the_kernel(root):
    registry = with_cubin(root, "toy.many", "sm_90a", samples.compiled(samples.kernel_source("other"), "sm_90a"))
    with pytest.raises(VerificationError, match=r"expected kernel toy_many, found other"):
        registry.load("toy.many")


def test_no_cubin_under_the_right_hash(root):
    with pytest.raises(VerificationError, match=r"expected a cubin, got a Git LFS pointer"):
        with_cubin(root, "toy.many", "sm_90a", LFS_POINTER).load("toy.many")


def test_r10_a_kernel_with_another_argument_list(root):
    registry = Registry.open(root)
    toy = registry.manifest.operators["toy"]
    shorter = msgspec.structs.replace(toy.arms["many"], args=samples.ARGS[:-1])
    toy = msgspec.structs.replace(toy, arms=toy.arms | {"many": shorter})
    samples.publish(root, msgspec.structs.replace(registry.manifest, operators={"toy": toy}))
    message = "expected toy_many to take 4 arguments of (8, 8, 4, 4) bytes (x, map, num_tokens, factor), found 5 of"
    with pytest.raises(VerificationError, match=re.escape(message)):
        samples.opened(root, FakeApi()).load("toy.many")


def test_r01_the_same_symbol_in_different_cubins(tmp_path):
    """Programs A and B both export `k`; only the corrupted one of four cubins fails."""
    store = Store(tmp_path / "cubins")
    programs = {}
    for arm, body in (("a", "x[0] = 1;"), ("b", "x[0] = 2;")):
        source = samples.kernel_source("k", body=body)
        cubins = {arch: samples.compiled(source, arch) for arch in ("sm_100a", "sm_103a")}
        for data in cubins.values():
            store.write(data)
        programs[f"toy.{arm}"] = samples.program(arm, [samples.kernel("k")], tuple(cubins), cubins)
    routes = [samples.route(896, (0, 1000), "toy.a"), samples.route(384, (0, 1000), "toy.b")]
    samples.publish(tmp_path, samples.manifest(programs, routes, archs=("sm_100a", "sm_103a")))
    api = FakeApi(capabilities=((10, 0), (10, 3)))
    registry = samples.opened(tmp_path, api)
    problems = [PROBLEM, PROBLEM | {"width": 384, "ways": 8}]
    selections = [registry.lookup("toy", arch, p) for p in problems for arch in ("sm_100a", "sm_103a")]
    assert len({selection.build.cubin_sha256 for selection in selections}) == 4
    corrupt = registry.store.path_of(selections[1].build.cubin_sha256)
    corrupt.write_bytes(corrupt.read_bytes()[:-1] + b"!")
    assert [(f.program, f.arch) for f in registry.verify().findings] == [("toy.a", "sm_103a")]
    for position, selection in enumerate(selections):
        device = 0 if selection.arch == "sm_100a" else 1
        if position == 1:
            with pytest.raises(VerificationError, match=r"toy.a for sm_103a: .*expected SHA-256"):
                registry.load(selection, device)
        else:
            registry.load(selection, device)
    assert len(set(api.images.values())) == 3


def test_no_variable_turns_verification_off():
    switches = {"CHORD_EP_ROWS", "CHORD_HUMMING", "CHORD_SM90_DECODE", "CHORD_USE_GROUPED"}
    places = {"CHORD_REGISTRY", "CHORD_RECEIPTS"}
    stricter = {"CHORD_PIN", "CHORD_LOCK", "CHORD_KEY", "CHORD_REQUIRE_RECEIPT"}
    assert set(_settings.KNOWN) == switches | places | stricter


def test_the_driver_gets_the_very_bytes_that_were_proven(root, api):
    registry = samples.opened(root, api)
    registry.load("toy.many")
    (image,) = api.images.values()
    assert image == path_of(registry, "toy.many", "sm_90a").read_bytes()
