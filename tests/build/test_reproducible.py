"""The same sources give the same bytes: in another folder, process, environment, order and degree of parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build.builder import build
from chord.build.tree import Tree

BUILD = """
import sys
from pathlib import Path
from chord.build.builder import build
from chord.build.tree import Tree
build(tree=Tree(Path(sys.argv[1])), jobs=int(sys.argv[2]))
"""


def built_elsewhere(root: Path, jobs: int, cwd: Path, **environ: str) -> Tree:
    toytree.write(root)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(root), str(jobs)],
        env={**os.environ, "PYTHONPATH": str(_paths.PACKAGE.parent), **environ},
        cwd=cwd,
        check=True,
    )
    return Tree(root)


def everything(tree: Tree) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [tree.manifest, *tree.store.iterdir()]}


def test_another_folder_and_process(built: Tree, tmp_path: Path) -> None:
    other = built_elsewhere(tmp_path / "some where/else", 1, tmp_path, PYTHONHASHSEED="7", LC_ALL="C", TZ="Asia/Tokyo")
    assert everything(other) == everything(built)


def test_nothing_around_the_build_reaches_the_compiler(built: Tree, tmp_path: Path) -> None:
    """Variables that NVRTC honours, and headers where it would look without --no-source-include."""
    trap = tmp_path / "trap"
    (trap / "common").mkdir(parents=True)
    (trap / "common" / "base.cuh").write_text("#error the header of the working directory was read\n")
    other = built_elsewhere(
        tmp_path / "tree2",
        2,
        trap,
        NVRTC_APPEND_FLAGS="-DTOY_VERBOSE -lineinfo",
        NVRTC_PREPEND_FLAGS=f"-I{trap}",
        CPATH=str(trap),
        LD_PRELOAD="",
        TMPDIR="/nonexistent",
        HOME="/nonexistent",
    )
    assert everything(other) == everything(built)


@pytest.mark.parametrize("jobs", [1, 3])
def test_any_number_of_processes(built: Tree, tree: Tree, jobs: int) -> None:
    build(tree=tree, jobs=jobs)
    assert everything(tree) == everything(built)


def test_cubins_hold_no_path_of_this_machine(built: Tree) -> None:
    for path in built.store.iterdir():
        data = path.read_bytes()
        assert str(built.root).encode() not in data
        assert b".cuh" not in data
