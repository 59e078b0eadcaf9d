"""The tables under registry/ against what the operators promise: same domain, same arguments, routes that admit."""

from __future__ import annotations

from itertools import product

import pytest

from chord.registry.schema import Build
from chord.router import launch, validate

pytest.importorskip("jinja2", reason="planning the tables needs the build extra")

from chord.build.assemble import assemble
from chord.build.jobs import read
from chord.build.tree import Tree


class AnyBuild(dict):
    """Stands in for what a compiler would have made of any program."""

    def __missing__(self, key):
        return Build(closure_sha256="0" * 64, cubin_sha256="0" * 64, size_bytes=1, min_driver=12000, kernels=())


@pytest.fixture(scope="module")
def operators():
    return assemble(read(Tree.default()), AnyBuild()).operators


def axis(operator, key):
    return next(axis for axis in operator.axes if key in axis.keys)


def test_fused_router_has_the_domain_that_its_arguments_are_checked_for(operators):
    operator = operators["fused_router"]
    assert axis(operator, "top_k").choices == validate.SELECTIONS
    assert {choice[0] for choice in axis(operator, "logits").choices} == set(validate.LOGITS_DTYPES.values())
    tokens, block_m = axis(operator, "num_tokens"), axis(operator, "block_m")
    assert (tokens.first, tokens.last, tokens.step) == (0, validate.MAX_TOKENS, 1)
    assert (block_m.first, block_m.last, block_m.step) == (8, validate.MAX_BLOCK_M, validate.BLOCK_M_STEP)


def test_route_plan_has_the_domain_that_its_arguments_are_checked_for(operators):
    operator = operators["route_plan"]
    pairs, block_m = axis(operator, "num_pairs"), axis(operator, "block_m")
    assert (pairs.first, pairs.last, pairs.step) == (0, validate.MAX_PAIRS, 1)
    assert (block_m.first, block_m.last, block_m.step) == (8, validate.MAX_BLOCK_M, validate.BLOCK_M_STEP)


@pytest.mark.parametrize("name", ["fused_router", "route_plan"])
def test_every_program_takes_what_is_passed(operators, name):
    operator = operators[name]
    for program_name, program in operator.programs.items():
        launch.check_abi(name, operator, program_name, program)


@pytest.mark.parametrize("name", ["fused_router", "route_plan"])
def test_routes_lead_to_programs_that_admit_all_of_their_box(operators, name):
    operator = operators[name]
    for arch, routes in operator.routes.items():
        for route in routes:
            sides = [value if isinstance(value, tuple) else (value,) for value in route.where.values()]
            for corner in product(*sides):
                problem = dict(zip(route.where, corner, strict=True))
                assert launch.admits(operator.programs[route.program], problem), (arch, route)
