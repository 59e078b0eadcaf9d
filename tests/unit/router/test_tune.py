"""From times to routes, and from routes to the table's text."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chord.build import tables, toolchain
from chord.build.plan import plan_operator
from chord.build.render import Renderer
from chord.build.tree import Tree
from chord.tune.routes import Interval, choose
from chord.tune.table import Box, replace_routes

times_of = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(1, 100), min_size=1)


@given(
    st.dictionaries(st.integers(1, 3000), times_of.map(lambda times: {**times, "general": 200.0}), min_size=1),
    st.dictionaries(st.integers(0, 4000), st.dictionaries(st.just("exact"), st.floats(1, 100), min_size=1), max_size=6),
    st.floats(0, 0.2),
)
def test_every_count_has_exactly_one_arm_that_admits_it(general, exact, hysteresis):
    seen = {arm: [count for count, times in general.items() if arm in times] for arm in "abc"}
    limits = {arm: max(counts) for arm, counts in seen.items() if counts}
    intervals = choose(general, exact, first=0, last=4000, limits=limits, hysteresis=hysteresis)
    assert intervals[0].first == 0
    assert intervals[-1].last == 4000
    assert [interval.first for interval in intervals[1:]] == [interval.last + 1 for interval in intervals[:-1]]
    for first, last, arm in intervals:
        assert first <= last
        assert arm != "exact" or (first == last and first in exact)
        assert last <= limits.get(arm, 4000)


def test_the_fastest_arm_wins_and_changes_lie_in_between():
    general = {1: {"small": 2.0, "large": 9.0}, 64: {"small": 4.0, "large": 9.0}, 256: {"small": 20.0, "large": 10.0}}
    assert choose(general, {}, first=0, last=1000, limits={}) == [
        Interval(0, 128, "small"),
        Interval(129, 1000, "large"),
    ]


def test_a_limit_moves_the_change():
    general = {64: {"small": 4.0, "large": 9.0}, 256: {"large": 10.0}}
    assert choose(general, {}, first=0, last=1000, limits={"small": 100})[0] == Interval(0, 100, "small")


def test_a_small_gain_at_one_count_is_not_worth_two_changes():
    general = {8: {"a": 2.0, "b": 2.0}, 16: {"a": 2.02, "b": 1.98}, 32: {"a": 2.0, "b": 2.05}}
    assert choose(general, {}, first=0, last=99, limits={}, hysteresis=0.03) == [Interval(0, 99, "a")]


def test_exact_arms_take_their_counts_where_they_pay():
    general = {1: {"small": 3.0}, 2: {"small": 3.0}, 4: {"small": 3.0}}
    exact = {1: {"single": 2.0}, 2: {"cluster": 2.95}, 4: {"cluster": 2.5, "pair": 2.4}}
    assert choose(general, exact, first=0, last=9, limits={}) == [
        Interval(0, 0, "small"),
        Interval(1, 1, "single"),
        Interval(2, 3, "small"),
        Interval(4, 4, "pair"),
        Interval(5, 9, "small"),
    ]


def test_nothing_general_measured_up_to_the_end():
    with pytest.raises(ValueError, match="a general arm without a limit, got none"):
        choose({1: {"small": 1.0}}, {}, first=0, last=1000, limits={"small": 64})
    with pytest.raises(ValueError, match="got none"):
        choose({}, {1: {"single": 1.0}}, first=0, last=1000, limits={})


TABLE = textwrap.dedent("""\
    # The router.
    schema = 1
    operator = "fused_router"

    [[axes]]
    keys = ["num_experts", "top_k"]
    choices = [[896, 16], [384, 8]]

    [[axes]]
    keys = ["block_m"]
    first = 8
    last = 256
    step = 8

    [[arms]]
    name = "small"  # kept

    [[routes]]
    archs = ["sm_90a", "sm_100a"]
    block_m = [8, 8]
    table = [[0, 100, "small"]]

    [[routes]]
    archs = ["sm_90a"]
    note = "old note"
    table = [[0, 5, "old"]]
    """)


def routes(text):
    return pytest.importorskip("tomllib").loads(text)["routes"]


def test_routes_of_one_architecture_are_replaced():
    boxes = [
        Box({"block_m": (8, 8)}, {"num_experts": [896]}, [Interval(0, 0, "small"), Interval(1, 1048576, "large")]),
        Box({"block_m": (8, 8)}, {"num_experts": [384]}, [Interval(0, 1048576, "large")]),
        Box({"block_m": (16, 256)}, {}, [Interval(0, 1048576, "large")]),
    ]
    text = replace_routes(TABLE, "sm_90a", boxes, "measured")
    assert text.startswith("# The router.\nschema = 1")
    assert "# kept" in text
    assert routes(text) == [
        {"archs": ["sm_100a"], "block_m": [8, 8], "table": [[0, 100, "small"]]},
        {
            "archs": ["sm_90a"],
            "note": "measured",
            "block_m": [8, 8],
            "only": {"num_experts": [896]},
            "table": [[0, 0, "small"], [1, 1048576, "large"]],
        },
        {
            "archs": ["sm_90a"],
            "note": "measured",
            "block_m": [8, 8],
            "only": {"num_experts": [384]},
            "table": [[0, 1048576, "large"]],
        },
        {"archs": ["sm_90a"], "note": "measured", "block_m": [16, 256], "table": [[0, 1048576, "large"]]},
    ]
    assert replace_routes(text, "sm_90a", boxes, "measured") == text, "writing the same routes again changes nothing"


def test_routes_beside_a_part_stay_and_are_cut_where_it_reaches_in():
    boxes = [Box({"block_m": (16, 24)}, {"num_experts": [384]}, [Interval(0, 3, "new")])]
    text = replace_routes(TABLE, "sm_90a", boxes, "measured")
    assert routes(text) == [
        {"archs": ["sm_90a", "sm_100a"], "block_m": [8, 8], "table": [[0, 100, "small"]]},
        {"archs": ["sm_90a"], "note": "old note", "only": {"num_experts": [896]}, "table": [[0, 5, "old"]]},
        {
            "archs": ["sm_90a"],
            "note": "old note",
            "block_m": [8, 8],
            "only": {"num_experts": [384]},
            "table": [[0, 5, "old"]],
        },
        {
            "archs": ["sm_90a"],
            "note": "old note",
            "block_m": [32, 256],
            "only": {"num_experts": [384]},
            "table": [[0, 5, "old"]],
        },
        {
            "archs": ["sm_90a"],
            "note": "old note",
            "block_m": [16, 24],
            "only": {"num_experts": [384]},
            "table": [[4, 5, "old"]],
        },
        {
            "archs": ["sm_90a"],
            "note": "measured",
            "block_m": [16, 24],
            "only": {"num_experts": [384]},
            "table": [[0, 3, "new"]],
        },
    ]


@pytest.mark.parametrize(("arch", "most"), [("sm_90a", None), ("sm_103a", 64)])
def test_any_part_of_the_routers_routes_can_be_replaced(tmp_path, arch, most):
    """The builder accepts the table afterwards: every size has one program."""
    tree = Tree.default()
    source = tree.registry / "fused_router.toml"
    renderer, pin = Renderer(tree.templates), toolchain.load(tree.toolchain)
    last = most or 1048576
    for part in (((896, (16, 16)),), ((384, (24, 256)), (896, (8, 8)))):
        boxes = [
            Box(
                {"block_m": block_m},
                {"num_experts": [experts]},
                [Interval(0, 30, "few32"), Interval(31, last, "general")],
            )
            for experts, block_m in part
        ]
        text = replace_routes(source.read_text(), arch, boxes, "a note")
        path = tmp_path / "fused_router.toml"
        path.write_text(text)
        assert plan_operator(*tables.load(path), renderer, pin).routes[arch], "covered without gap or overlap"
        rows = [row for row in routes(text) if row.get("note") == "a note"]
        assert len(rows) == len(part)
