"""Wheels, source distributions and installs of a small copy of the project: complete, exact, the same each time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import toytree
from chord.build.builder import build
from chord.build.tree import Tree

pytestmark = pytest.mark.packaging

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def make(python: Python, root: Path, out: Path, *kinds: str) -> list[Path]:
    """`python -m build` in the project's root, as a person would say it there."""
    ran = python("-m", "build", "--no-isolation", "--outdir", out, *kinds, cwd=root)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return sorted(out.iterdir())


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def cubins_of(root: Path) -> set[str]:
    text = json.loads((root / "manifest.json").read_text())
    return {
        f"chord/_data/build/out/cubins/{build['cubin_sha256']}.cubin"
        for operator in text["operators"].values()
        for program in operator["programs"].values()
        for build in program["builds"].values()
    }


def test_wheel_holds_the_package_its_data_and_the_manifests_cubins(clone: Path, python: Python, tmp_path: Path) -> None:
    (clone / "templates" / "toy" / "notes.txt").write_text("stray")
    (clone / "registry" / ".toy.toml.swp").write_text("stray")
    (wheel,) = make(python, clone, tmp_path / "dist", "--wheel")
    names = names_in(wheel)
    data = {name for name in names if name.startswith("chord/_data/")}
    sources = {f"chord/_data/{name}" for name in [*toytree.FILES, "manifest.json", "build/toolchain.toml"]}
    assert data == sources | cubins_of(clone)
    code = {path.relative_to(clone).as_posix() for path in (clone / "chord").rglob("*") if path.is_file()}
    about = {name for name in names if ".dist-info/" in name}
    assert names - data - about == {name for name in code if "__pycache__" not in name}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_wheels_are_the_same_from_clone_built_tree_and_sdist(clone: Path, python: Python, tmp_path: Path) -> None:
    (unbuilt,) = make(python, clone, tmp_path / "first", "--wheel")
    build(tree=Tree(clone), jobs=2)
    (clone / "build" / "out" / "cubins" / f"{'0' * 64}.cubin").write_bytes(b"stray")
    from_sdist, sdist = make(python, clone, tmp_path / "second")  # without a kind the wheel is made from the sdist
    (built,) = make(python, clone, tmp_path / "third", "--wheel")
    assert sdist.name.endswith(".tar.gz")
    assert unbuilt.read_bytes() == from_sdist.read_bytes() == built.read_bytes()


def test_sdist_is_the_sources(clone: Path, python: Python, tmp_path: Path) -> None:
    build(tree=Tree(clone), jobs=2)
    (sdist,) = make(python, clone, tmp_path / "dist", "--sdist")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        path.relative_to(clone).as_posix()
        for path in clone.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.is_relative_to(clone / "build" / "out")
    }
    assert names == expected | {"PKG-INFO"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("closure", "manifest.json is not that of the sources; run `chord build`: toy.single."),
        ("cubin", "cubins that are not the manifest's came out of the compiler: toy."),
        ("missing", "manifest.json: expected the committed manifest, found no file"),
    ],
)
def test_no_wheel_of_what_the_manifest_does_not_say(
    clone: Path, python: Python, tmp_path: Path, damage: str, said: str
) -> None:
    manifest = clone / "manifest.json"
    if damage == "closure":
        toytree.edit(clone, "templates/toy/single.cu.j2", "+ {{ num_tokens }}", "- {{ num_tokens }}")
    elif damage == "cubin":
        digest = sorted(cubins_of(clone))[0][-70:-6]
        manifest.write_text(manifest.read_text().replace(digest, "0" * 64))
    else:
        manifest.unlink()
    ran = python("-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", cwd=clone)
    assert ran.returncode != 0
    assert said in ran.stdout + ran.stderr
    assert not list((tmp_path / "dist").glob("*.whl"))


def test_a_damaged_cubin_in_the_store_is_compiled_again(clone: Path, python: Python, tmp_path: Path) -> None:
    build(tree=Tree(clone), jobs=2)
    victim = sorted((clone / "build" / "out" / "cubins").iterdir())[0]
    good = victim.read_bytes()
    victim.write_bytes(good[:100])
    (wheel,) = make(python, clone, tmp_path / "dist", "--wheel")
    assert zipfile.ZipFile(wheel).read(f"chord/_data/build/out/cubins/{victim.name}") == good


PROBE = """
import importlib.util, json, pathlib, sys
import chord
from chord import _paths
from chord.registry import Registry
def home(name):
    spec = importlib.util.find_spec(name)
    return None if spec is None else [spec.origin, *map(str, spec.submodule_search_locations or [])]
registry = Registry.open()
print(json.dumps({
    "package": chord.__file__, "data": str(_paths.data_root()),
    "others": {name: home(name) for name in ("build", "registry", "templates", "scripts", "tests", "bench")},
    "programs": len(list(registry.programs())),
}))
"""


def probe(interpreter: Path, cwd: Path) -> dict[str, object]:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([str(interpreter), "-c", PROBE], cwd=cwd, capture_output=True, text=True, env=bare)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def install(python: Python, interpreter: Path, what: Path, cwd: Path) -> Path:
    """Install into the fresh environment; its site-packages."""
    site = next(interpreter.parent.parent.glob("lib/python*/site-packages"))
    arguments = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", site, what]
    ran = python("-m", "pip", "install", *arguments, cwd=cwd)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return site


def assert_nothing_of_ours_but_chord(found: dict[str, object], *roots: Path) -> None:
    others = found["others"]
    assert isinstance(others, dict)
    for name, places in others.items():
        for place in places or []:
            assert not any(Path(str(place)).is_relative_to(root) for root in roots), f"{name} is {place}"


def test_install_of_a_clean_clone_is_complete(
    clone: Path, python: Python, fresh_environment: Path, tmp_path: Path
) -> None:
    site = install(python, fresh_environment, clone, tmp_path)
    shutil.move(clone, tmp_path / "gone")
    found = probe(fresh_environment, tmp_path)
    assert found["package"] == str(site / "chord" / "__init__.py")
    assert found["data"] == str(site / "chord" / "_data")
    assert found["programs"] == toytree.PROGRAMS
    assert_nothing_of_ours_but_chord(found, site, tmp_path / "gone")
    top = {path.name for path in site.iterdir()} - {"dependencies.pth", "bin"}
    assert {name for name in top if not name.startswith("chord_registry-")} == {"chord"}
    assert cubins_of(tmp_path / "gone") == {path.relative_to(site).as_posix() for path in site.rglob("*.cubin")}


EDITABLE = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"


def test_editable_install_reads_the_checkout(
    clone: Path, python: Python, fresh_environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "dist").mkdir()
    ran = python("-c", EDITABLE, tmp_path / "dist", cwd=clone)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert not any("_data" in name for name in names_in(wheel))
    site = next(fresh_environment.parent.parent.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    found = probe(fresh_environment, tmp_path)
    assert found["package"] == str(clone / "chord" / "__init__.py")
    assert found["data"] == str(clone)
    assert_nothing_of_ours_but_chord(found, site, clone)


def test_signatures_and_receipts_travel(clone: Path, python: Python, tmp_path: Path) -> None:
    (clone / "manifest.json.dsse").write_text("{}")
    (clone / "registry" / "receipts").mkdir()
    for name in ("h200.json", "h200.json.dsse", "README.md"):
        (clone / "registry" / "receipts" / name).write_text("{}")
    wheel, sdist = make(python, clone, tmp_path / "dist")
    carried = {"manifest.json.dsse", "registry/receipts/h200.json", "registry/receipts/h200.json.dsse"}
    assert carried <= {name.removeprefix("chord/_data/") for name in names_in(wheel)}
    assert "chord/_data/registry/receipts/README.md" not in names_in(wheel)
    with tarfile.open(sdist) as archive:
        assert carried <= {name.partition("/")[2] for name in archive.getnames()}


def test_a_commit_is_reproduced_from_a_clean_clone(clone: Path, tmp_path: Path) -> None:
    """scripts/reproduce.sh, in this environment instead of a fresh one, and a deployed folder with other bytes."""
    build(tree=Tree(clone), jobs=2)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *words], cwd=clone, check=True)
    deployed = tmp_path / "deployed"
    shutil.copytree(clone / "build" / "out" / "cubins", deployed / "cubins")
    shutil.copy(clone / "manifest.json", deployed)
    shutil.rmtree(clone / "build" / "out")
    command = ["bash", str(clone / "scripts" / "reproduce.sh"), "HEAD", str(deployed)]

    def reproduce() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "VENV": str(Path(sys.executable).parents[1])}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = reproduce()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{toytree.CUBINS} compiled" in done.stdout
    assert "reproduced: " in done.stdout
    assert not (clone / "build" / "out").exists(), "the checkout is left alone"
    victim = next((deployed / "cubins").iterdir())
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    assert "1 mismatch" in (refused := reproduce()).stdout
    assert refused.returncode == 1
    toytree.edit(clone, "templates/toy/single.cu.j2", "+ {{ num_tokens }}", "- {{ num_tokens }}")
    subprocess.run(["git", *identity, "commit", "-q", "-am", "changed"], cwd=clone, check=True)
    refused = reproduce()
    assert refused.returncode == 1
    assert "is not what its sources give" in refused.stderr
