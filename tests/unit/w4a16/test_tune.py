"""The parts of the W4A16 tuner that need no GPU: sizes, routes from times, and the table that they are written into."""

import shutil
from types import SimpleNamespace

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
    found.boxes_of["moe_w4a16_masked"] = [Box({}, {}, w4a16.intervals({8: {"mma_r48": [1.0]}}, 0.02))]
    tuning.write_tuned(found, tmp_path, folder / "moe_w4a16.toml")
    for name in ("moe_w4a16", "moe_w4a16_contiguous", "moe_w4a16_masked"):
        rows = {
            tuple(row["archs"]): row for row in tomlkit.parse((folder / f"{name}.toml").read_text()).unwrap()["routes"]
        }
        own = [[0, 1 << 30, "mma_r48"]], [[0, 22, "mma_r32"], [23, 1 << 30, "wgmma_r64"]]
        assert rows["sm_90a",]["table"] == own[name != "moe_w4a16_masked"], name
        assert rows["sm_90a",]["note"].startswith(
            "as moe_w4a16: " if name != "moe_w4a16" else "measured on NVIDIA H200"
        )


def programs(*single, loop="wgmma", **several):
    """What _boxes must know of programs: their arms, main loops, and which hold several tiles."""
    constants = {"loop": loop}
    found = dict.fromkeys(single, constants) | {arm: constants | {"low_mean": 22} for arm in several}
    return [SimpleNamespace(arm=arm, constants=values) for arm, values in found.items()]


def test_shapes_that_different_programs_serve_have_routes_of_their_own():
    assert w4a16.k_sides([None, None]) == [(64, 1 << 20)]
    sides = w4a16.k_sides([None, 512, 1024, 512])
    assert sides == [(64, 512), (576, 1024), (1088, 1 << 20)]
    times = {sides[0]: {8: {"short": [2.0], "wrong": [1.0]}}, sides[2]: {8: {"short": [3.0], "tall": [2.0]}}}
    boxes = list(w4a16._boxes(times, programs("short", "tall", "wrong"), {"wrong"}, 0.02))
    every = (0, w4a16.MAX_EXPERT_ROWS)
    assert [(box.ranges, box.intervals[0].arm) for box in boxes] == [
        ({"k": sides[0], "most_rows": every}, "short"),
        ({"k": sides[2], "most_rows": every}, "tall"),
    ]


def test_routes_guard_an_arm_for_many_rows_by_one_that_is_never_far_from_the_best():
    few, many, steady = {4: 10.0, 64: 40.0}, {4: 12.0, 64: 30.0}, {4: 11.0, 64: 31.0}
    arms = {"few": few, "many": many, "steady": steady, "steady_worse": {4: 11.0, 64: 32.0}}
    times = {(64, 512): {rows: {arm: [us[rows]] for arm, us in arms.items()} for rows in (4, 64)}}
    found = programs("few", "many", steady=True, steady_worse=True)
    low, high = w4a16._boxes(times, found, set(), 0.02)
    last = w4a16.MAX_EXPERT_ROWS
    assert low.ranges == {"k": (64, 512), "most_rows": (0, 16)}
    assert low.intervals == [(0, last, "few")]
    assert high.ranges == {"k": (64, 512), "most_rows": (17, last)}
    assert high.intervals == [(0, 16, "steady"), (17, last, "many")]
    unguarded = list(w4a16._boxes(times, found, {"steady", "steady_worse"}, 0.02))
    assert [box.intervals for box in unguarded] == [[(0, last, "few")], [(0, last, "many")]]


def test_an_arm_guards_itself_where_no_other_is_steadier_for_the_rows_that_can_be():
    """Of 64 rows the second arm is far from the best, but where there can be 32 at most that does not count."""
    arms = {"first": {4: 10.0, 16: 30.0, 64: 90.0}, "second": {4: 10.5, 16: 20.0, 64: 60.0}}
    arms |= {"third": {4: 20.0, 16: 40.0, 64: 40.0}, "steady": {4: 11.0, 16: 21.0, 64: 42.0}}
    times = {(64, 512): {rows: {arm: [us[rows]] for arm, us in arms.items()} for rows in (4, 16, 64)}}
    found = [
        box.intervals for box in w4a16._boxes(times, programs("first", "second", "third", steady=True), set(), 0.02)
    ]
    last = w4a16.MAX_EXPERT_ROWS
    assert found == [[(0, last, "first")], [(0, last, "second")], [(0, 32, "steady"), (33, last, "third")]]


def test_slabs_keep_the_guard_until_a_part_of_the_expected_rows_suits_the_arm():
    """At 4 and 16 rows the arm for many is a fifth slower than the best; at 32 it is not."""
    arms = {"few": {4: 10.0, 16: 20.0, 32: 30.0, 64: 60.0}, "many": {4: 12.0, 16: 24.0, 32: 31.0, 64: 40.0}}
    arms["steady"] = {4: 10.5, 16: 21.0, 32: 31.0, 64: 42.0}
    times = {(64, 512): {rows: {arm: [us[rows]] for arm, us in arms.items()} for rows in (4, 16, 32, 64)}}
    low, high = w4a16._boxes(times, programs("few", "many", steady=True), set(), 0.02, wrong_by=8)
    last = w4a16.MAX_EXPERT_ROWS
    assert low.intervals == [(0, last, "few")]
    assert high.intervals == [(0, 8 * 32 - 1, "steady"), (8 * 32, last, "many")]


def test_a_size_that_one_shape_lacks_moves_no_other():
    """At 4 and 32 rows the arm is slow; at 16 only one of two shapes was measured."""
    best, slow = [10.0, 10.0], [12.0, 12.0]
    times = {4: {"arm": slow, "best": best}, 16: {"arm": [10.0], "best": [10.0]}, 32: {"arm": slow, "best": best}}
    times |= {64: {"arm": best, "best": best}}
    assert w4a16._suited_from(times, "arm") == 64
    assert w4a16._suited_from({**times, 64: {"arm": slow, "best": best}}, "arm") == 64
    assert w4a16._suited_from(times, "best") == 0


def test_programs_of_several_tiles_only_guard_and_all_routes_have_one_loop():
    times = {(64, 512): {rows: {"plain": [2.0], "other": [1.0 * rows], "several": [1.9]} for rows in (1, 64)}}
    found = [*programs("plain", several=True), *programs("other", loop="mma")]
    (box,) = w4a16._boxes(times, found, set(), 0.02)
    assert box.intervals == [(0, w4a16.MAX_EXPERT_ROWS, "plain")]


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
