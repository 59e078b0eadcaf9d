"""Every program for at most 32 tokens, routed or a candidate, at every count that it admits."""

from __future__ import annotations

import pytest
import torch

from chord import _runtime
from chord.checks.inputs import ADVERSARIES, SELECTIONS, adversarial_case, mixed_batch, normal_case
from chord.checks.qualify import EVERY_COUNT_TO, RUN_TIME_BLOCK_M
from chord.checks.router import Settings, candidates, compare_programs, router_problems, run_graphed, run_prepared
from chord.router.experts import expert_map_of

pytestmark = pytest.mark.gpu

each_domain = pytest.mark.parametrize(
    ("experts", "dtype"), [(experts, dtype) for experts, _ in SELECTIONS for dtype in (torch.float32, torch.bfloat16)]
)
each_block_m = pytest.mark.parametrize("block_m", [8, 16, RUN_TIME_BLOCK_M])


def programs_for_few(case, settings):
    """Programs that admit a case and at most EVERY_COUNT_TO tokens."""
    known = _runtime.operator("fused_router").programs
    return [
        name
        for name in candidates(case, settings)
        if known[name].num_tokens is not None or (known[name].limit("num_tokens") or 1 << 20) <= EVERY_COUNT_TO
    ]


@each_domain
@each_block_m
def test_every_count_with_ordinary_and_hostile_rows(experts, dtype, block_m, device, expect_none):
    """All experts, then a rank's own by a map; the hostile kinds take turns over the counts."""
    local = expert_map_of(range(experts // 8, experts // 4), experts, device)
    kinds, problems, tried = list(ADVERSARIES), [], set()
    for tokens in range(1, EVERY_COUNT_TO + 1):
        hostile = adversarial_case(kinds[(tokens + block_m) % len(kinds)], tokens, experts, dtype, device)
        owned = Settings(block_m, False, 2.5, local_experts=local, num_local_experts=experts // 8)
        for case, settings in ((mixed_batch(tokens, experts, dtype, device), Settings(block_m)), (hostile, owned)):
            names = programs_for_few(case, settings)
            tried.update(names)
            problems += compare_programs(case, settings, names)
    expect_none(problems)
    arms = {_runtime.operator("fused_router").programs[name].arm for name in tried}
    admitting = {"solo", "few32"} | (set() if block_m == RUN_TIME_BLOCK_M else {"few", "few8"})
    assert admitting <= arms


@each_domain
@each_block_m
def test_graphs_of_every_program(experts, dtype, block_m, device, expect_none):
    """Each program once, captured and replayed into outputs that were poisoned after the capture."""
    problems, done = [], set()
    for tokens in (1, 2, 4, 8, 16, 9, 31):
        case, settings = normal_case(tokens, experts, dtype, device, seed=3), Settings(block_m)
        for name in programs_for_few(case, settings):
            if name not in done:
                done.add(name)
                written = run_graphed(case, settings, name)
                problems += [f"{name}: {problem}" for problem in router_problems(case, settings, written)]
    expect_none(problems)
    assert done


@each_domain
def test_no_tokens(experts, dtype, device, expect_none):
    case, settings = normal_case(0, experts, dtype, device), Settings(8)
    expect_none(
        f"{name}: {problem}"
        for name in programs_for_few(case, settings)
        for problem in router_problems(case, settings, run_prepared(case, settings, name, launches=2))
    )
