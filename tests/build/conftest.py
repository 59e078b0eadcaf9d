"""The builder's tests work on copies of a toy tree; those that need it share one that is built."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toytree
from chord.build.builder import build
from chord.build.tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Nothing built yet."""
    return Tree(toytree.write(tmp_path / "tree"))


@pytest.fixture(scope="session")
def _built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = toytree.write(tmp_path_factory.mktemp("built") / "tree")
    build(tree=Tree(root), jobs=2)
    return root


@pytest.fixture
def built(_built_once: Path, tmp_path: Path) -> Tree:
    """Everything built, in a folder of its own."""
    shutil.copytree(_built_once, tmp_path / "built")
    return Tree(tmp_path / "built")
