"""Which registry is opened, and which is refused: paths, pins, versions, variables."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import msgspec
import pytest
from unit.registry.samples import plain_manifest, publish

from chord import _paths, _settings
from chord._version import __version__
from chord.errors import ManifestError, NoProgramError, PinMismatchError, SettingsError
from chord.registry import Registry, canonical
from chord.registry import schema as s


@pytest.fixture
def plain(tmp_path):
    return publish(tmp_path, plain_manifest())


def digest_of(root) -> str:
    return canonical.digest((root / "manifest.json").read_bytes())


def test_r23_argument_beats_environment_beats_default(plain, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    info = s.RegistryInfo(version=__version__, serial=9)
    publish(other, msgspec.structs.replace(plain_manifest(), registry=info))
    monkeypatch.setattr(_paths, "data_root", lambda: plain)
    assert (Registry.open().root, Registry.open().source) == (plain, "the packaged registry")
    monkeypatch.setenv("CHORD_REGISTRY", str(other))
    assert (Registry.open().root, Registry.open().source) == (other, "CHORD_REGISTRY")
    assert (Registry.open(str(plain)).root, Registry.open(str(plain)).source) == (plain, "path")
    assert Registry.open(plain, path_name="--registry").source == "--registry"


def test_r23_an_empty_folder_is_an_error_and_never_falls_back(plain, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(_paths, "data_root", lambda: plain)
    monkeypatch.setenv("CHORD_REGISTRY", str(empty))
    with pytest.raises(SettingsError, match=f"CHORD_REGISTRY: expected a registry in {empty}"):
        Registry.open()
    with pytest.raises(SettingsError, match=r"^path: expected a registry"):
        Registry.open(empty)
    with pytest.raises(SettingsError, match=r"^--registry: expected a registry"):
        Registry.open(empty, path_name="--registry")


@pytest.mark.parametrize("name", ["path", "lock", "key", "receipts"])
@pytest.mark.parametrize("value", ["", " "])
def test_r23_an_empty_path_is_not_the_working_folder(plain, name, value, monkeypatch):
    monkeypatch.chdir(plain)
    with pytest.raises(SettingsError, match=f"^{name} is empty: expected a path"):
        Registry.open(**{name: value})


def test_values_of_another_type_are_named(plain):
    with pytest.raises(TypeError, match="require_receipt: expected a bool, got 'no'"):
        Registry.open(plain, require_receipt="no")
    with pytest.raises(SettingsError, match="pin 5 is not a digest"):
        Registry.open(plain, pin=5)
    registry = Registry.open(plain)
    for call in (([], "sm_90a", {}), ("toy", [], {}), ("toy", "sm_90a", None), ("toy", "sm_90a", [1, 2, 3, 4])):
        with pytest.raises(TypeError, match="lookup: expected the names of an operator"):
            registry.lookup(*call)
    problem = {"width": 896, "ways": 16, "num_tokens": 10**5000, "block_m": 8}
    with pytest.raises(NoProgramError, match="num_tokens=a number of 16610 bits"):
        registry.lookup("toy", "sm_90a", problem)


@pytest.mark.parametrize("name", ["path", "lock", "receipts", "key"])
def test_a_path_with_a_nul_is_a_clean_error(plain, name):
    if name == "key":
        pytest.importorskip("securesystemslib", reason="needs the extra sign")
    with pytest.raises(SettingsError, match=rf"^{name}: expected"):
        Registry.open(**({"path": plain} | {name: "a\0b"}))


def test_r23_a_spawned_process_resolves_the_same(plain, monkeypatch):
    monkeypatch.setenv("CHORD_REGISTRY", str(plain))
    monkeypatch.setenv("PYTHONPATH", str(_paths.PACKAGE.parent))
    code = "from chord.registry import Registry; r = Registry.open(); print(r.root, r.source, r.digest)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(plain), "CHORD_REGISTRY", digest_of(plain)]


def test_every_pin_counts(plain, monkeypatch):
    right, wrong = digest_of(plain), "1" * 64
    assert Registry.open(plain, pin=right).digest == right
    with pytest.raises(PinMismatchError, match=f"has SHA-256 {right}, pin expects {wrong}"):
        Registry.open(plain, pin=wrong)
    monkeypatch.setenv("CHORD_PIN", wrong)
    for pin in (None, right):
        with pytest.raises(PinMismatchError, match=f"CHORD_PIN expects {wrong}"):
            Registry.open(plain, pin=pin)
    monkeypatch.setenv("CHORD_PIN", right)
    assert Registry.open(plain, pin=right).digest == right


def test_a_pin_is_checked_before_the_manifest_is_believed(plain):
    (plain / "manifest.json").write_bytes(b"{")
    with pytest.raises(PinMismatchError):
        Registry.open(plain, pin="1" * 64)


@pytest.mark.parametrize("pin", ["", "1" * 63, "A" * 64, "sha256:" + "1" * 64])
def test_a_malformed_pin_is_refused(plain, pin, monkeypatch):
    with pytest.raises(SettingsError, match=r"^pin .*is not a digest"):
        Registry.open(plain, pin=pin)
    monkeypatch.setenv("CHORD_PIN", pin)
    with pytest.raises(SettingsError, match=r"^CHORD_PIN .*is not a digest"):
        Registry.open(plain)


def test_a_known_variable_is_refused_when_it_says_nothing(monkeypatch):
    monkeypatch.setenv("CHORD_REGISTRY", " ")
    with pytest.raises(SettingsError, match=r"CHORD_REGISTRY is empty"):
        Registry.open()


def test_r23_an_unknown_variable_is_warned_about_once(plain, monkeypatch):
    monkeypatch.setattr(_settings, "_warned", set())
    monkeypatch.setenv("CHORD_REGISTYR", "/somewhere")
    with pytest.warns(UserWarning, match=r"CHORD_REGISTYR .* did you mean CHORD_REGISTRY\?") as caught:
        Registry.open(plain)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Registry.open(plain)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CHORD_PINN", "did you mean CHORD_PIN?"),
        ("CHORD_USE_GROUP", "did you mean CHORD_USE_GROUPED?"),
        *((name, f"known are {', '.join(sorted(_settings.KNOWN))}") for name in ("CHORD_DEBUG", "CHORD_X", "CHORD_")),
    ],
)
def test_only_a_name_that_is_close_is_suggested(name, said, monkeypatch):
    monkeypatch.setattr(_settings, "_warned", set())
    message = f"{name} is not a variable that chord knows, and has no effect; {said}"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        _settings.read({name: "1"})


@pytest.mark.parametrize("version", ["{0}", "{0}+cu130"])
def test_r10_a_local_suffix_is_no_difference(tmp_path, version):
    made = plain_manifest(version=version.format(__version__))
    assert Registry.open(publish(tmp_path, made)).manifest == made


@pytest.mark.parametrize("version", ["0.0.9", "{0}.1", "{0}rc1", ""])
def test_r10_another_version_is_refused(tmp_path, version):
    version = version.format(__version__)
    with pytest.raises(ManifestError, match=f"belongs to chord {version}, this is chord {__version__}"):
        Registry.open(publish(tmp_path, plain_manifest(version=version)))


def test_the_store_lies_where_the_build_leaves_it_or_beside_the_manifest(tmp_path):
    flat, built = tmp_path / "cubins", tmp_path / "build/out/cubins"
    assert _paths.store_of(tmp_path) == built
    flat.mkdir()
    assert _paths.store_of(tmp_path) == flat
    built.mkdir(parents=True)
    assert _paths.store_of(tmp_path) == built


def test_paths_follow_the_checkout():
    root = Path(__file__).resolve().parents[3]
    assert _paths.data_root() == root
    assert _paths.registry_dir() == root / "registry"
    assert (Registry.open().root, Registry.open().source) == (root, "the checkout")


def test_paths_follow_the_wheel(tmp_path, monkeypatch):
    (tmp_path / "_data").mkdir()
    monkeypatch.setattr(_paths, "PACKAGE", tmp_path)
    assert _paths.data_root() == tmp_path / "_data"
    publish(tmp_path / "_data", plain_manifest())
    assert Registry.open().source == "the packaged registry"


def test_programs_and_coverage(plain):
    registry = Registry.open(plain)
    assert list(registry.programs()) == ["toy.many", "toy.one.t1"]
    assert list(registry.programs("toy", "sm_100a")) == ["toy.many", "toy.one.t1"]
    assert registry.programs(arch="sm_103a") == {}
    assert {r.program for r in registry.coverage("toy", "sm_90a")} == {"toy.many", "toy.one.t1"}
    with pytest.raises(LookupError, match=r"it has sm_90a, sm_100a"):
        registry.coverage("toy", "sm_103a")
    for ask in (lambda: registry.programs("tyo"), lambda: registry.lookup("tyo", "sm_90a", {})):
        with pytest.raises(LookupError, match=r"no operator 'tyo'; there are toy"):
            ask()


def test_a_selection_says_what_was_found(plain):
    problem = {"width": 896, "ways": 16, "num_tokens": 1, "block_m": 8}
    found = Registry.open(plain).lookup("toy", "sm_100a", problem)
    assert (found.operator, found.program_name, found.arch) == ("toy", "toy.one.t1", "sm_100a")
    assert found.build == found.program.builds["sm_100a"]
    assert found.arm.args[0].name == "x"
