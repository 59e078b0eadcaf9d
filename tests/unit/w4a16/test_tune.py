"""The parts of the W4A16 tuner that need no GPU: sizes, routes from times, and the table that they are written into."""

import shutil

import pytest
import tomlkit

from chord import _paths
from chord.bench.results import Results
from chord.build import tables
from chord.tune import tuning, w4a16
from chord.tune.table import Box, replace_routes


def test_tokens_give_the_wanted_rows_an_expert():
    for rows in w4a16.EXPERT_ROWS:
        for experts in (48, 384):
            assert w4a16.tokens_for(rows, experts) * w4a16.TOP_K == rows * experts
    assert w4a16.tokens_for(1, 4) == 1


def test_routes_follow_the_mean_over_shapes_and_cover_every_count():
    times = {
        4: {"short": [10.0, 20.0], "tall": [15.0, 30.0]},
        16: {"short": [20.0, 40.0], "tall": [20.0, 40.0]},
        64: {"short": [80.0, 10.0], "tall": [40.0, 11.0], "elsewhere": [1.0]},
    }
    routes = w4a16.intervals(times, 0.02)
    assert [route.arm for route in routes] == ["short", "tall"]
    assert (routes[0].first, routes[-1].last) == (0, 1 << 30)
    assert routes[0].last + 1 == routes[1].first
    with pytest.raises(ValueError, match="expected, at the largest count"):
        w4a16.intervals({4: {}}, 0.02)


def test_tables_that_borrow_the_arms_get_the_routes_too(tmp_path):
    source, folder = _paths.registry_dir(), tmp_path / "registry"
    shutil.copytree(source, folder)
    assert {path.stem for path in tuning.borrowers("moe_w4a16", folder)} == {"moe_w4a16_contiguous", "moe_w4a16_masked"}
    results = Results(
        suite="w4a16", date="2026-12-01", gpu="NVIDIA H200", driver="1", torch="2", commit="c", peers={}, method="how",
        flush="read", steady_ms=1, rows=[],
    )  # fmt: skip
    routes = w4a16.intervals({8: {"mma_r32": [1.0]}, 64: {"wgmma_r64": [1.0]}}, 0.02)
    found = tuning.Tuning("moe_w4a16", "sm_90a", results, [Box({}, {}, routes)])
    tuning.write_tuned(found, tmp_path, folder / "moe_w4a16.toml")
    for name in ("moe_w4a16", "moe_w4a16_contiguous", "moe_w4a16_masked"):
        rows = {
            tuple(row["archs"]): row for row in tomlkit.parse((folder / f"{name}.toml").read_text()).unwrap()["routes"]
        }
        assert rows["sm_90a",]["table"] == [[0, 22, "mma_r32"], [23, 1 << 30, "wgmma_r64"]], name
        assert rows["sm_90a",]["note"].startswith(
            "as moe_w4a16: " if name != "moe_w4a16" else "measured on NVIDIA H200"
        )


def test_shapes_that_different_programs_serve_have_routes_of_their_own():
    assert w4a16.k_sides([None, None]) == [(64, 1 << 20)]
    sides = w4a16.k_sides([None, 512, 1024, 512])
    assert sides == [(64, 512), (576, 1024), (1088, 1 << 20)]
    times = {sides[0]: {8: {"short": [2.0], "wrong": [1.0]}}, sides[2]: {8: {"short": [3.0], "tall": [2.0]}}}
    boxes = list(w4a16._boxes(times, {"wrong"}, 0.02, set()))
    every = (0, w4a16.MAX_EXPERT_ROWS)
    assert [(box.ranges, box.intervals[0].arm) for box in boxes] == [
        ({"k": sides[0], "most_rows": every}, "short"),
        ({"k": sides[2], "most_rows": every}, "tall"),
    ]


def test_routes_guard_an_arm_for_many_rows_by_one_that_fits():
    few, many, fits = {4: 10.0, 64: 40.0}, {4: 12.0, 64: 30.0}, {4: 11.0, 64: 31.0}
    arms = {"few": few, "many": many, "fits": fits, "fits_worse": {4: 12.0, 64: 32.0}}
    times = {(64, 512): {rows: {arm: [us[rows]] for arm, us in arms.items()} for rows in (4, 64)}}
    low, high = w4a16._boxes(times, set(), 0.02, {"fits", "fits_worse"})
    last = w4a16.MAX_EXPERT_ROWS
    assert low.ranges == {"k": (64, 512), "most_rows": (0, 16)}
    assert low.intervals == [(0, last, "few")]
    assert high.ranges == {"k": (64, 512), "most_rows": (17, last)}
    assert high.intervals == [(0, 16, "fits"), (17, last, "many")]
    unguarded = list(w4a16._boxes(times, {"fits", "fits_worse"}, 0.02, {"fits", "fits_worse"}))
    assert [box.intervals for box in unguarded] == [[(0, last, "few")], [(0, last, "many")]]


def test_the_table_takes_them_and_keeps_the_rest(tmp_path):
    source = _paths.registry_dir() / "moe_w4a16.toml"
    routes = w4a16.intervals({8: {"mma_r32": [1.0]}, 64: {"wgmma_r64": [1.0]}}, 0.02)
    text = replace_routes(source.read_text(), "sm_90a", [Box({}, {}, routes)], "a note")
    table = tmp_path / "moe_w4a16.toml"
    table.write_text(text)
    tables.load(table)
    rows = {tuple(row["archs"]): row["table"] for row in tomlkit.parse(text).unwrap()["routes"]}
    assert rows["sm_90a",] == [[0, 22, "mma_r32"], [23, 1 << 30, "wgmma_r64"]]
    assert "sm_100a" in str(rows)


def test_routes_for_few_rows_are_not_swept_but_stay_and_the_others_go_round_them(tmp_path):
    text = (_paths.registry_dir() / "moe_w4a16.toml").read_text()
    last, box = (1 << 31) - 1, Box({"k": (576, 1 << 20)}, {}, w4a16.intervals({8: {"mma_r32": [1.0]}}, 0.02))
    text = replace_routes(text, "sm_90a", [box], "a note", "all_rows")
    table = tmp_path / "moe_w4a16.toml"
    table.write_text(text)
    tables.load(table)
    rows = [row for row in tomlkit.parse(text).unwrap()["routes"] if row["archs"] == ["sm_90a"] and row["k"][0] == 576]
    assert [(row["all_rows"], row["table"][0][2]) for row in rows] == [
        ([0, 16], "turns_r16"),
        ([17, last], "mma_r32"),
    ]
