"""Routes cover the domain exactly, or the check names the cell; a lookup then finds what a plain search finds."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.registry.samples import AXES, plain_manifest

from chord.errors import NoProgramError
from chord.registry import schema as s
from chord.registry.boxes import check_axes, check_cover
from chord.registry.lookup import RouteIndex

RANGES = (s.Axis(keys=("a",), first=0, last=11), s.Axis(keys=("b",), first=8, last=40, step=8))


@st.composite
def partitions(draw):
    """Routes that cut the domain of RANGES by cuts in a, each strip by its own cuts in b."""
    routes = []
    a_cuts = sorted({0, 12, *draw(st.lists(st.integers(1, 11), max_size=3))})
    for low, high in pairwise(a_cuts):
        b_cuts = sorted({8, 48, *draw(st.lists(st.sampled_from([16, 24, 32, 40]), max_size=3))})
        for first, end in pairwise(b_cuts):
            where = {"a": (low, high - 1), "b": (first, end - 8)}
            routes.append(s.Route(where=where, program=f"toy.p{len(routes)}"))
    return draw(st.permutations(routes))


def operator_with(axes, routes) -> s.Operator:
    return s.Operator(abi_version=1, axes=axes, arms={}, programs={}, routes={"sm_90a": tuple(routes)}, notes={})


@given(partitions())
def test_a_partition_has_no_problems_and_every_lookup_agrees_with_a_plain_search(routes):
    assert check_cover(RANGES, routes) == []
    index = RouteIndex("toy", operator_with(RANGES, routes))
    for a, b in product(range(12), range(8, 48, 8)):
        inside = [
            r for r in routes if r.where["a"][0] <= a <= r.where["a"][1] and r.where["b"][0] <= b <= r.where["b"][1]
        ]
        assert [index.find("sm_90a", {"a": a, "b": b})] == [r.program for r in inside]


@pytest.mark.parametrize("strips", [2, 64, 65, 200])
def test_many_routes_are_checked_as_few_are(strips):
    axes = (s.Axis(keys=("a",), first=0, last=strips - 1), RANGES[1])
    routes = [s.Route(where={"a": (i, i), "b": (8, 40)}, program=f"toy.p{i}") for i in range(strips)]
    assert check_cover(axes, routes) == []
    assert [gap for gap in check_cover(axes, routes[:-1]) if "no route" in gap]
    wide = s.Route(where={"a": (0, 1), "b": (8, 40)}, program="toy.wide")
    assert [overlap for overlap in check_cover(axes, [wide, *routes[1:]]) if "more than one route" in overlap]
    doubled = [*routes[:-1], routes[0]]  # as large as the domain, all in all
    assert len(check_cover(axes, doubled)) == 2


@given(partitions(), st.data())
def test_a_missing_route_is_a_gap_and_a_doubled_one_an_overlap(routes, data):
    chosen = data.draw(st.sampled_from(routes))
    (a, _), (b, _) = chosen.where["a"], chosen.where["b"]
    gaps = check_cover(RANGES, [r for r in routes if r is not chosen])
    assert any(g.startswith(f"a={a}..") and "no route" in g and f"b={b}.." in g for g in gaps)
    assert all("more than one route" in o for o in check_cover(RANGES, [*routes, chosen]))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": (0, 11)}, "expected the keys a, b, got a"),
        ({"a": (0, 12), "b": (8, 40)}, r"a = \(0, 12\), expected"),
        ({"a": (5, 4), "b": (8, 40)}, r"a = \(5, 4\)"),
        ({"a": (0, 11), "b": (8, 41)}, "in steps of 8"),
        ({"a": 3, "b": (8, 40)}, "a = 3, expected"),
    ],
)
def test_a_route_off_the_axes_is_named(where, message):
    (problem,) = check_cover(RANGES, [s.Route(where=where, program="toy.p")])
    assert problem.startswith("route of toy.p: ")
    assert re.search(message, problem)


def test_a_choice_that_does_not_exist_is_named():
    wrong = s.Route(where={"width": 896, "ways": 8, "num_tokens": (0, 1000), "block_m": (8, 64)}, program="toy.p")
    assert check_cover(AXES, [wrong]) == ["route of toy.p: width=896, ways=8 is not among the axes' choices"]


@pytest.mark.parametrize(
    "axis",
    [
        s.Axis(keys=(), first=0, last=1),
        s.Axis(keys=("a", "b"), first=0, last=1),
        s.Axis(keys=("a",), first=0, last=9, step=8),
        s.Axis(keys=("a",)),
        s.Axis(keys=("a", "b"), choices=((1,),)),
        s.Axis(keys=("a",), choices=((1,), (1,))),
    ],
)
def test_an_axis_that_is_none_is_named(axis):
    assert check_axes([axis])
    assert check_axes([s.Axis(keys=("a",), first=0, last=1)] * 2)


TOY = plain_manifest().operators["toy"]
PROBLEM = {"width": 896, "ways": 16, "num_tokens": 7, "block_m": 24}


@given(st.sampled_from(AXES[0].choices), st.integers(0, 1000), st.integers(1, 8))
def test_lookup_is_total_over_the_domain(choice, tokens, blocks):
    problem = {"width": choice[0], "ways": choice[1], "num_tokens": tokens, "block_m": 8 * blocks}
    expected = "toy.one.t1" if (choice[0], tokens) == (896, 1) else "toy.many"
    assert RouteIndex("toy", TOY).find("sm_90a", problem) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 1001}, "no program for num_tokens=1001; allowed are 0..1000, nearest is 1000"),
        ({"num_tokens": -5}, "no program for num_tokens=-5; allowed are 0..1000, nearest is 0"),
        ({"block_m": 30}, "no program for block_m=30; allowed are 8..64 in steps of 8, nearest is 32"),
        ({"block_m": 8.0}, "block_m=8.0 is not a whole number"),
        ({"width": 256}, "no program for width=256, ways=16; allowed are .* nearest is width=384, ways=8|896"),
        ({"width": [1]}, r"no program for width=\[1\]"),
        ({"extra": 1}, "unknown extra"),
    ],
)
def test_a_refusal_names_the_key_the_value_what_is_allowed_and_the_nearest(change, message):
    with pytest.raises(NoProgramError, match=message):
        RouteIndex("toy", TOY).find("sm_90a", PROBLEM | change)


def test_a_missing_key_is_named():
    with pytest.raises(NoProgramError, match=r"missing width"):
        RouteIndex("toy", TOY).find("sm_90a", {k: v for k, v in PROBLEM.items() if k != "width"})
    with pytest.raises(NoProgramError, match=r"missing width, unknown wdith"):
        RouteIndex("toy", TOY).find("sm_90a", {"wdith" if k == "width" else k: v for k, v in PROBLEM.items()})


@pytest.mark.parametrize("arch", ["sm_90", "90a", "sm_100", "sm_100f", "sm_103", "SM_90A", ""])
def test_architecture_names_are_strict(arch):
    routes = dict.fromkeys(("sm_100a", "sm_90a", "sm_103a"), TOY.routes["sm_90a"])
    operator = s.Operator(abi_version=1, axes=AXES, arms={}, programs={}, routes=routes, notes={})
    with pytest.raises(NoProgramError, match=r"has sm_90a, sm_100a, sm_103a"):
        RouteIndex("toy", operator).find(arch, PROBLEM)


def test_a_device_without_its_cubin_gets_no_neighbour():
    with pytest.raises(NoProgramError, match=r"needs 'sm_103a', has sm_90a, sm_100a"):
        RouteIndex("toy", TOY).find("sm_103a", PROBLEM)


def test_a_lookup_takes_microseconds():
    from time import perf_counter

    index = RouteIndex("toy", TOY)
    index.find("sm_90a", PROBLEM)
    best = min(_timed(index, perf_counter) for _ in range(20))
    assert best < 50e-6


def _timed(index, clock) -> float:
    start = clock()
    for _ in range(100):
        index.find("sm_90a", PROBLEM)
    return (clock() - start) / 100
