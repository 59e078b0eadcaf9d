"""Copies of the project with the toy tree in place of its data: packages that build in a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build.builder import build
from chord.build.tree import Tree

ROOT = _paths.PACKAGE.parent
PACKAGED = ("chord", "scripts", "pyproject.toml", ".gitignore", "LICENSE", "README.md")


def copy_project(root: Path) -> Path:
    """What a clone of the project holds, with toy data and a manifest, not built."""
    root.mkdir()
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "_data"))
        else:
            shutil.copy(source, root / name)
    toytree.write(root)
    build(tree=Tree(root), jobs=2)
    shutil.rmtree(root / "build" / "out")
    return root


@pytest.fixture(scope="session")
def _clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("packaging") / "clone")


@pytest.fixture
def clone(_clone: Path, tmp_path: Path) -> Path:
    """A clean clone of its own, not built."""
    shutil.copytree(_clone, tmp_path / "clone")
    return tmp_path / "clone"


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs this interpreter with arguments; output is captured, failure is for the caller to judge."""

    def run(*arguments: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PIP_NO_INDEX": "1", **environ},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def fresh_environment(tmp_path: Path) -> Path:
    """An interpreter with this environment's dependencies and no chord: a virtual environment and one .pth file."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    # A folder named in a .pth file is put on the path, but its own .pth files (an editable chord's) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin" / "python"
