"""The committed manifest is what the committed sources give, program by program."""

from __future__ import annotations

import pytest

from chord.build import jobs
from chord.build.check import check
from chord.build.tree import Tree
from chord.errors import ChordError

TREE = Tree.default()


@pytest.fixture(scope="module")
def different() -> dict[tuple[str, str], str]:
    """What `chord build --check` finds, by program and architecture; compiles what this machine has not built yet."""
    return {(found.program, found.arch): found.what for found in check(tree=TREE).differences}


def keys() -> list[tuple[str, str]]:
    """Every program and architecture; none when the tables cannot be read, which the last test then says."""
    try:
        return [job.key for job in jobs.read(TREE).jobs]
    except ChordError:
        return []


@pytest.mark.parametrize("key", keys(), ids=" ".join)
def test_program(key: tuple[str, str], different: dict[tuple[str, str], str]) -> None:
    assert different.get(key) is None


def test_nothing_else_differs(different: dict[tuple[str, str], str]) -> None:
    assert different == {}
