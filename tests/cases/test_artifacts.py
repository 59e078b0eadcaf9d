"""R01 to R04, R07, R08, R10: bytes, stores, machines and architectures, for every operator of this registry."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from load.hammer import copy_registry
from unit.registry.fakes import FakeApi

from chord import _paths
from chord._version import __version__
from chord.errors import ManifestError, NoProgramError, UnsupportedDeviceError, VerificationError
from chord.registry import Registry, canonical
from chord.registry.architectures import BY_CAPABILITY, KNOWN
from chord.registry.driver import Driver
from chord.registry.loading import Loader

OPERATORS = sorted(Registry.open(relock=True).manifest.operators)
ROOT = _paths.PACKAGE.parent
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
X86 = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\x3e\0" + bytes(1000)
CAPABILITY = {arch: capability for capability, arch in BY_CAPABILITY.items()}


def on(root, *archs):
    """The registry with a faked device of each architecture."""
    registry = Registry.open(root, relock=True)
    registry._loader = Loader(Driver(FakeApi(capabilities=tuple(CAPABILITY[arch] for arch in archs or ("sm_90a",)))))
    return registry


def builds_of(registry, operator):
    """(program, architecture, its cubin's path), sorted."""
    programs = registry.programs(operator)
    return [
        (name, arch, registry.store.path_of(program.builds[arch].cubin_sha256))
        for name, program in programs.items()
        for arch in sorted(program.builds)
    ]


def chord(root, *words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "chord", *words, "--registry", str(root)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


def test_every_operator_has_cases():
    """An operator joins these tests by its manifest, and the numeric ones by a row in operators.py."""
    pytest.importorskip("torch", reason="operators.py needs torch")
    from cases.operators import CASES

    assert {case.operator for case in CASES} == set(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_r01_each_lookup_has_its_own_verified_bytes(root, operator):
    """Two programs on each architecture: as many hashes as pairs; a corrupt one fails alone, the others load."""
    found = builds_of(on(root), operator)
    names = sorted({name for name, _, _ in found})[:2]
    pairs = [(name, arch, path) for name, arch, path in found if name in names]
    archs = sorted({arch for _, arch, _ in pairs})
    assert len({path for _, _, path in pairs}) == len(pairs)
    bad_name, bad_arch, bad_path = pairs[-1]
    bad_path.write_bytes(bytes([*bad_path.read_bytes()[:-1], bad_path.read_bytes()[-1] ^ 1]))
    registry = on(root, *archs)
    assert [(f.program, f.arch) for f in registry.verify().findings] == [(bad_name, bad_arch)]
    for name, arch, _ in pairs:
        if (name, arch) == (bad_name, bad_arch):
            with pytest.raises(VerificationError, match=re.escape(f"{name} for {arch}: {bad_path}: expected SHA-256")):
                registry.load(name, archs.index(arch))
        else:
            registry.load(name, archs.index(arch))
    assert len(registry._loader.driver.api.images) == len(pairs) - 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_r02_completeness_comes_from_the_manifest(root, operator):
    (_, _, gone), (_, _, short) = builds_of(on(root), operator)[:2]
    gone.unlink()
    short.write_bytes(short.read_bytes()[:-100])
    (gone.parent / "deadbeef.cubin").write_bytes(b"x")
    done = chord(root, "verify", "--json")
    assert done.returncode == 1
    counts = json.loads(done.stdout)
    assert (counts["missing"], counts["mismatch"], counts["unlisted"]) == (1, 1, 1)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("digest", ["", "0" * 63])
def test_r02_a_malformed_hash_is_a_manifest_error_that_names_the_entry(operator, digest):
    raw = json.loads((ROOT / "manifest.json").read_bytes())
    name = sorted(raw["operators"][operator]["programs"])[-1]
    raw["operators"][operator]["programs"][name]["builds"]["sm_90a"]["cubin_sha256"] = digest
    with pytest.raises(ManifestError, match=rf"programs\['{re.escape(name)}'\].builds\['sm_90a'\].cubin_sha256"):
        canonical.decode(json.dumps(raw).encode(), "manifest.json")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("data", "looks"),
    [
        (LFS_POINTER, "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>404 Not Found</html>", "an HTML page"),
        (X86, "an ELF for x86-64, not for CUDA"),
    ],
)
def test_r03_a_file_that_is_not_a_cubin(root, operator, data, looks):
    registry = on(root)
    name, _, path = next(found for found in builds_of(registry, operator) if found[1] == "sm_90a")
    size = path.stat().st_size
    path.write_bytes(data)
    with pytest.raises(
        VerificationError, match=re.escape(f"{path}: expected {size} bytes, found {len(data)}: {looks}")
    ):
        registry.load(name)
    assert registry._loader.driver.api.count("cuModuleLoadData") == 0


LAUNCH_ALL = r"""
import os, sys
from unit.registry.fakes import FakeApi  # imports cuda.bindings, which looks for a driver in ways of its own
complaints = []
def hook(event, args):
    if event == "open" and (args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)):
        complaints.append((event, args))
    if event.startswith(("socket.", "subprocess.")) or event in (
        "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate",
        "os.fork", "os.exec", "os.posix_spawn", "os.system", "shutil.copyfile", "tempfile.mkstemp", "tempfile.mkdtemp",
    ):
        complaints.append((event, args))
sys.addaudithook(hook)
from chord.registry import Registry
from chord.registry.driver import Driver
from chord.registry.loading import Loader
api = FakeApi()
registry = Registry.open(sys.argv[1])
registry._loader = Loader(Driver(api))
assert registry.verify().ok
for operator in registry.manifest.operators:
    for name in registry.preload(operator):
        kernel = registry.load(name)
        kernel.prepare({arg.name: 8 for arg in kernel.args}, stream=1)()
assert not complaints, complaints
print(os.getuid(), len(api.launches))
"""


@pytest.fixture
def place():
    """A folder that every user may read, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="chord-r04-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("uid", [None, 12345])
def test_r04_a_read_only_machine_and_an_unknown_user(place, uid):
    """Import, open, verify, look up, load and launch every routed program with nowhere to write (a faked driver)."""
    root = copy_registry(place / "registry")
    (place / "working").mkdir()
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {
        "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent", "TMPDIR": "/nonexistent",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *packages]),
    }  # fmt: skip
    interpreter = sys.executable if uid is None else interpreter_for(uid, environment)
    before = listing(place)
    read_only(place, 0o555)
    try:
        done = subprocess.run(
            [interpreter, "-c", LAUNCH_ALL, str(root)], cwd=place / "working", env=environment, user=uid, umask=0,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        read_only(place, 0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(os.getuid() if uid is None else uid)
    assert int(done.stdout.split()[1]) >= len(OPERATORS)
    assert listing(place) == before


def interpreter_for(uid, environment):
    """A Python of this version that the user can run with our packages; skips where there is none."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    major, minor = sys.version_info[:2]
    for interpreter in (sys.executable, f"/usr/bin/python{major}.{minor}"):
        try:
            probe = [interpreter, "-c", "import chord, msgspec, unit.registry.fakes"]
            done = subprocess.run(probe, user=uid, env=environment, cwd="/", capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return interpreter
    pytest.skip(f"needs a Python {major}.{minor} and packages that user {uid} can read")


def listing(folder):
    found = sorted(path for path in folder.rglob("*"))
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in found}


def read_only(folder, mode):
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(mode)


@pytest.mark.parametrize("operator", OPERATORS)
def test_r07_no_cubin_for_this_gpu(root, operator):
    """Builds for sm_90a and sm_100a alone, on a 10.3 device: refused before any load, naming what there is."""
    manifest = Registry.open(root).manifest
    definition = manifest.operators[operator]
    kept = {
        name: msgspec.structs.replace(
            program,
            architectures=tuple(a for a in program.architectures if a != "sm_103a"),
            builds={a: b for a, b in program.builds.items() if a != "sm_103a"},
        )
        for name, program in definition.programs.items()
    }
    routes = {arch: routes for arch, routes in definition.routes.items() if arch != "sm_103a"}
    changed = msgspec.structs.replace(definition, programs=kept, routes=routes)
    operators = {**manifest.operators, operator: changed}
    (root / "manifest.json").write_bytes(canonical.encode(msgspec.structs.replace(manifest, operators=operators)))
    registry = on(root, "sm_103a")
    both = next(name for name, program in kept.items() if len(program.builds) == 2)
    with pytest.raises(UnsupportedDeviceError, match="device 0 needs sm_103a, has sm_90a, sm_100a"):
        registry.load(both)
    with pytest.raises(NoProgramError, match=r"it has sm_90a, sm_100a"):
        registry.preload(operator)
    with pytest.raises(NoProgramError, match="needs 'sm_103a', has sm_90a, sm_100a"):
        registry.lookup(operator, "sm_103a", {})
    assert registry._loader.driver.api.count("cuModuleLoadData") == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_r07_a_label_that_is_not_the_cubins_target(root, operator):
    """An entry for sm_103a whose file is the sm_100a cubin, size and hash being right."""
    manifest = Registry.open(root).manifest
    definition = manifest.operators[operator]
    name = next(name for name, program in sorted(definition.programs.items()) if len(program.builds) == 3)
    program = definition.programs[name]
    wrong = msgspec.structs.replace(program, builds=program.builds | {"sm_103a": program.builds["sm_100a"]})
    changed = msgspec.structs.replace(definition, programs=definition.programs | {name: wrong})
    operators = {**manifest.operators, operator: changed}
    (root / "manifest.json").write_bytes(canonical.encode(msgspec.structs.replace(manifest, operators=operators)))
    registry = on(root, "sm_103a")
    (finding,) = (f for f in registry.verify().findings if f.kind == "mismatch")
    assert (finding.program, finding.arch) == (name, "sm_103a")
    assert "expected a cubin for sm_103a, found one for sm_100a" in finding.message
    with pytest.raises(VerificationError, match="expected a cubin for sm_103a, found one for sm_100a"):
        registry.load(name)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("arch", ["sm_90", "90a", "sm_100", "sm_100f", "sm_103", "SM_90A", ""])
def test_r08_architecture_names_are_strict(operator, arch):
    registry = Registry.open(relock=True)
    for ask in (
        lambda: registry.lookup(operator, arch, {}),
        lambda: registry.coverage(operator, arch),
        lambda: registry.programs(operator, arch),
    ):
        with pytest.raises(NoProgramError) as caught:
            ask()
        assert all(name in str(caught.value) for name in KNOWN)


@pytest.mark.parametrize("capability", [(8, 9), (10, 1), (12, 0), (12, 1)])
def test_r08_a_device_that_is_not_in_the_table(root, capability):
    registry = Registry.open(root)
    registry._loader = Loader(Driver(FakeApi(capabilities=(capability,))))
    for operator in OPERATORS:
        name = next(iter(registry.programs(operator)))
        with pytest.raises(UnsupportedDeviceError, match="this GPU is {}.{}, not supported".format(*capability)) as why:
            registry.load(name)
        assert "old" not in str(why.value)
    assert registry._loader.driver.api.count("cuModuleLoadData") == 0


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda raw: raw.update(schema_version=2), "has schema_version 2, this chord reads 1"),
        (lambda raw: raw.update(surprise=1), "unknown field `surprise`"),
        (lambda raw: raw["registry"].update(version="0.2.9"), f"belongs to chord 0.2.9, this is chord {__version__}"),
    ],
)
def test_r10_a_manifest_of_another_time_is_refused(root, edit, said, monkeypatch):
    raw = json.loads((root / "manifest.json").read_bytes())
    edit(raw)
    (root / "manifest.json").write_text(json.dumps(raw))
    monkeypatch.setenv("CHORD_REQUIRE_RECEIPT", "0")
    with pytest.raises(ManifestError, match=re.escape(said)):
        Registry.open(root)


def test_r10_a_local_suffix_is_no_difference(root):
    raw = json.loads((root / "manifest.json").read_bytes())
    raw["registry"]["version"] = f"{__version__}+cu130"
    (root / "manifest.json").write_text(json.dumps(raw))
    assert Registry.open(root).verify().ok


@pytest.mark.parametrize("operator", OPERATORS)
def test_r10_an_argument_plan_one_argument_shorter(root, operator):
    """The manifest's list against the cubin's own, before the driver sees it; the wrappers' lists are tried by R10 of
    their own tests.
    """
    manifest = Registry.open(root).manifest
    definition = manifest.operators[operator]
    name, program = next(iter(sorted(definition.programs.items())))
    arm = definition.arms[program.arm]
    arms = definition.arms | {program.arm: msgspec.structs.replace(arm, args=arm.args[1:])}
    operators = {**manifest.operators, operator: msgspec.structs.replace(definition, arms=arms)}
    (root / "manifest.json").write_bytes(canonical.encode(msgspec.structs.replace(manifest, operators=operators)))
    registry = on(root)
    with pytest.raises(VerificationError, match=rf"to take {len(arm.args) - 1} arguments .* found {len(arm.args)}"):
        registry.load(name)
    assert registry._loader.driver.api.count("cuModuleLoadData") == 0
