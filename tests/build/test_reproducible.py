"""The same sources give the same bytes: in another folder, process, environment, order and degree of parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build import jobs as jobs_module
from chord.build.builder import build
from chord.build.pool import CompilerPool
from chord.build.tree import Tree

BUILD = """
import sys
from pathlib import Path
from chord.build import jobs as jobs_module
from chord.build.builder import build
from chord.build.pool import CompilerPool
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
    """Variables that NVRTC reads, headers where it might look, libraries that the loader would prefer."""
    trap = tmp_path / "trap"
    (trap / "common").mkdir(parents=True)
    (trap / "common" / "base.cuh").write_text("#error the header of the working directory was read\n")
    for name in ("libnvrtc.so.12", "libnvrtc-builtins.so.12.9"):
        (trap / name).write_bytes(b"not a library")
    other = built_elsewhere(
        tmp_path / "tree2",
        2,
        trap,
        NVRTC_APPEND_FLAGS="-DTOY_VERBOSE -lineinfo",
        NVRTC_PREPEND_FLAGS=f"-I{trap}",
        CPATH=str(trap),
        LD_LIBRARY_PATH=str(trap),
        LD_PRELOAD="",
        TMPDIR="/nonexistent",
        HOME="/nonexistent",
    )
    assert everything(other) == everything(built)


def test_compilers_run_in_a_bare_environment(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-lineinfo")
    work = jobs_module.read(tree)
    with CompilerPool(work.pin, 1) as pool:
        (_, result), *_ = pool.compile_all({0: work.jobs[0].request})
        assert result.cubin
        (process,) = pool._processes
        environ = Path(f"/proc/{process._popen.pid}/environ").read_bytes().split(b"\0")
    assert {entry.partition(b"=")[0] for entry in environ if entry} <= {b"PATH", b"LD_LIBRARY_PATH", b"LC_ALL"}


@pytest.mark.parametrize("jobs", [1, 3])
def test_any_number_of_processes(built: Tree, tree: Tree, jobs: int) -> None:
    build(tree=tree, jobs=jobs)
    assert everything(tree) == everything(built)


def test_cubins_hold_no_path_of_this_machine(built: Tree) -> None:
    for path in built.store.iterdir():
        data = path.read_bytes()
        assert str(built.root).encode() not in data
        assert b".cuh" not in data
