"""`chord build --check` and `chord verify --rebuild`: nothing is changed, every difference has its program's name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toytree
from chord.build.builder import BuildFailedError
from chord.build.check import check
from chord.build.jobs import Selection
from chord.build.tree import Tree
from chord.errors import ManifestError

PROGRAM = "operators.toy.programs.toy.many.w128.l4.bf16"
SINGLE = "templates/toy/single.cu.j2"


def everything(root: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


def differences(tree: Tree, selection: Selection | None = None, *, fresh: bool = False) -> list[str]:
    """Check, and see that no file was touched."""
    before = everything(tree.root)
    report = check(selection, tree=tree, jobs=2, fresh=fresh)
    assert everything(tree.root) == before
    return [str(difference) for difference in report.differences]


def test_a_built_tree_is_equal(built: Tree) -> None:
    assert differences(built) == []
    assert differences(built, fresh=True) == []


def test_a_clean_clone_is_compiled_and_equal(built: Tree) -> None:
    shutil.rmtree(built.out)
    report = check(tree=built, jobs=2)
    assert (report.compiled, report.differences) == (toytree.CUBINS, ())
    assert not built.out.exists()


def test_a_changed_template_lists_its_programs(built: Tree) -> None:
    toytree.edit(built.root, SINGLE, "+ {{ num_tokens }}", "- {{ num_tokens }}")
    found = differences(built)
    assert len(found) == 4 * 3
    assert all(line.startswith("toy.single.") and ": closure: the manifest has " in line for line in found)
    assert len(differences(built, Selection(architectures=("sm_100a",)))) == 4


def test_a_wrong_hash_is_found_without_trusting_the_manifest(built: Tree) -> None:
    text = built.manifest.read_text()
    digest = sorted(built.store.iterdir())[0].stem
    built.manifest.write_text(text.replace(digest, "0" * 64))
    found = differences(built)
    assert len(found) == text.count(digest)
    assert all(f"cubin: the manifest has {'0' * 64}, the sources give {digest}" in line for line in found)


def test_a_wrong_resource_is_found(built: Tree) -> None:
    built.manifest.write_text(built.manifest.read_text().replace('"min_driver": 12090', '"min_driver": 12091', 1))
    assert [line.partition(": ")[2] for line in differences(built)] == [
        "min_driver: the manifest has 12091, the sources give 12090"
    ]


def test_programs_that_came_and_went(built: Tree) -> None:
    toytree.edit(built.root, "registry/toy.toml", "num_tokens = [1, 2]", "num_tokens = [1, 2, 3]")
    found = differences(built)
    assert len(found) == 6
    assert all("is in the tables, not in the manifest" in line for line in found)
    toytree.edit(built.root, "registry/toy.toml", "num_tokens = [1, 2, 3]", "num_tokens = [1]")
    toytree.edit(built.root, "registry/toy.toml", '  [2, 2, "single"],\n  [3, 1000', "  [2, 1000")
    found = differences(built)
    assert len(found) == 6
    assert all("is in the manifest, not in the tables" in line for line in found)


@pytest.mark.parametrize(
    ("name", "old", "new", "path"),
    [
        ("registry/registry.toml", "serial = 3", "serial = 4", "registry.serial"),
        (
            "registry/toy.toml",
            "max_per_sm = 4",
            "max_per_sm = 8",
            "operators.toy.programs.toy.many.w128.l4.bf16.kernels",
        ),
        ("registry/toy.toml", 'note = "reasoned"', 'note = "measured"', "operators.toy.notes.sm_100a"),
        ("registry/toy.toml", "abi_version = 1", "abi_version = 2", "operators.toy.abi_version"),
        ("registry/toy.toml", "abi_version = 1", "abi_version = 1  # said", ""),
    ],
)
def test_what_lies_outside_the_cubins(built: Tree, name: str, old: str, new: str, path: str) -> None:
    toytree.edit(built.root, name, old, new)
    found = differences(built)
    assert bool(found) == bool(path)
    if path:
        assert found[0] == f"manifest.json: {path} is not what the sources say; write it with `chord build`"


def test_a_source_that_no_program_uses_is_still_recorded(built: Tree) -> None:
    (built.include / "toy" / "unused.cuh").write_text("")
    assert [line.partition(" is not")[0] for line in differences(built)] == [
        "manifest.json: sources.include/toy/unused.cuh"
    ]


def test_bytes_that_are_not_canonical(built: Tree) -> None:
    built.manifest.write_bytes(built.manifest.read_bytes() + b"\n")
    assert differences(built) == ["manifest.json: its bytes are not in canonical form; write it with `chord build`"]


def test_no_manifest(tree: Tree) -> None:
    found = differences(tree)
    assert len(found) == toytree.CUBINS


def test_a_manifest_that_cannot_be_read(built: Tree) -> None:
    built.manifest.write_text("{}")
    with pytest.raises(ManifestError):
        check(tree=built)


def test_sources_that_do_not_compile(built: Tree) -> None:
    shutil.rmtree(built.work)
    toytree.edit(built.root, SINGLE, "+ {{ num_tokens }}", "+ {{ num_token }}")
    with pytest.raises(BuildFailedError, match="'num_token' is undefined"):
        check(tree=built, jobs=2)
