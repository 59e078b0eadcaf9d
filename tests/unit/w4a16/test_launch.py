"""What a launch takes for granted of the tables, and how what moves rows finds its program."""

from __future__ import annotations

import re
from types import SimpleNamespace

import msgspec
import pytest

from chord import _paths, _runtime
from chord.errors import ManifestError
from chord.w4a16 import launch


def test_the_least_tile_is_that_of_the_tables():
    """It bounds how many tiles, and so how large a grid, so many rows can give: a lower one leaves rows out."""
    for operator in launch.GEMMS:
        programs = _runtime.operator(operator).programs.values()
        tallest = [program.constants.get("low_rows", program.constants["max_rows"]) for program in programs]
        assert min(tallest) >= launch._LEAST_TILE_ROWS, operator
    header = (_paths.data_root() / "templates/include/gemm/rows_few.cuh").read_text()
    assert re.findall(r"kLeastTile = (\d+);", header) == [str(launch._LEAST_TILE_ROWS)], "there each run is one tile"


def test_r10_a_registry_whose_programs_are_chosen_otherwise_is_refused(monkeypatch):
    """Such as one that was made before the axis all_rows was there, of the same version."""
    known = _runtime.operator(launch.OPERATOR)
    axes = tuple(axis for axis in known.axes if axis.keys != ("all_rows",))
    monkeypatch.setattr(_runtime, "operator", lambda name: msgspec.structs.replace(known, axes=axes))
    launch._last_few.cache_clear()
    asked = {
        "routes": lambda: launch.route_intervals(4096, 7168, 48, "sm_90a"),
        "rows": lambda: launch.all_rows({"num_rows": 1, "top_k": 8}),
        "tuning": lambda: launch.few_arms("sm_90a"),
    }
    for ask in asked.values():
        with pytest.raises(ManifestError, match=r"by all_rows, .* the manifest by expert_rows, .* belong together"):
            ask()


@pytest.fixture
def two_sizes(monkeypatch):
    """A registry with one program for up to 10 units and another beyond; the problems that it was asked for."""
    asked = []

    class Sizes:
        def lookup(self, operator, arch, problem):
            asked.append((operator, arch, problem))
            return SimpleNamespace(program_name="few" if problem["num_units"] <= 10 else "many")

    monkeypatch.setattr(_runtime, "registry", Sizes)
    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "_load", lambda operator, device, program: program)
    launch._row_mover.cache_clear()
    yield asked
    launch._row_mover.cache_clear()


def test_rows_are_moved_by_the_program_for_their_number(two_sizes, monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "_launch", lambda kernel, device, values: launched.append((kernel, values)))
    for units in (10, 11, 11, 10):
        launch.move_rows("moe_swiglu", 0, {"num_units": units})
    assert [kernel for kernel, _ in launched] == ["few", "many", "many", "few"]
    assert two_sizes == [("moe_swiglu", "sm_90a", {"num_units": units}) for units in (10, 11)], "each size once"
