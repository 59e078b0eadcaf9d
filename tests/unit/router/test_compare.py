"""The comparison that judges kernels must itself see every fault: right results pass, each spoiled one is named."""

from __future__ import annotations

import math
import re

import pytest
import torch

from chord.checks import compare, router
from chord.checks.compare import POISON, check_ids, check_plan, check_weights, differing, same_bits
from chord.checks.inputs import ADVERSARIES, adversarial_case, mixed_batch, normal_case
from chord.checks.router import (
    Settings,
    check_route_plan,
    check_router,
    check_router_with,
    router_problems,
    run_prepared,
    spacious_plan,
)
from chord.router import reference

CPU = torch.device("cpu")


def spoiled(change, kind=None, settings=Settings()):  # noqa: B008 - a tuple
    """Problems found after `change(buffers)` has altered a right result of 33 tokens."""
    case = adversarial_case(kind, 33, 384, torch.float32, CPU) if kind else normal_case(33, 384, torch.float32, CPU)
    buffers = run_prepared(case, settings)
    assert router_problems(case, settings, buffers) == []
    change(buffers)
    return router_problems(case, settings, buffers)


def set_to(name, place, value):
    def change(buffers):
        target = buffers.plan if name in buffers.plan._fields else buffers
        getattr(target, name)[place] = value

    return change


FAULTS = {
    "a weight off": (set_to("topk_weights", (3, 1), 0.5), r"topk_weights\[3, 1\]: expected"),
    "a weight unwritten": (set_to("topk_weights", (32, 7), math.nan), r"topk_weights\[32, 7\]: .* got nan"),
    "an id out of range": (set_to("topk_ids", (3, 7), 384), r"topk_ids: entries outside 0..383; first at \[3, 7\]"),
    "an id unwritten": (set_to("topk_ids", (0, 0), POISON), r"topk_ids: entries outside"),
    "an id twice": (lambda b: b.topk_ids[:, 1].copy_(b.topk_ids[:, 0]), r"topk_ids: not ascending and distinct"),
    "ids by score": (lambda b: b.topk_ids.copy_(b.topk_ids.flip(1)), r"topk_ids: not ascending"),
    "a pair lost": (set_to("sorted_token_ids", 0, 264), r"plan.sorted_token_ids\[0\]: expected"),
    "written beyond the extent": (
        set_to("sorted_token_ids", -1, 0),
        r"sorted_token_ids.* expected .*untouched.*, got 0",
    ),
    "a block wrong": (set_to("expert_ids", 1, 383), r"plan.expert_ids\[1\]"),
    "blocks beyond": (set_to("expert_ids", -1, 264), r"plan.expert_ids.*untouched"),
    "extent": (set_to("num_tokens_post_padded", 0, 8), r"plan.num_tokens_post_padded\[0\]: .* got 8"),
    "a count": (set_to("expert_counts", 383, 99), r"plan.expert_counts\[383\]: .* got 99"),
    "an offset": (set_to("expert_offsets", 384, 0), r"plan.expert_offsets\[384\]"),
    "scatter unwritten": (set_to("expert_scatter_offsets", 5, POISON), r"expert_scatter_offsets\[5\]: .*untouched"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    change, message = FAULTS[fault]
    problems = spoiled(change)
    assert any(re.search(message, problem) for problem in problems), problems


def test_a_lower_ranked_expert_is_found():
    case = normal_case(5, 896, torch.float32, CPU)
    _, ranks = reference.selected_scores(case.logits, case.bias)
    ids = ranks.topk(17, dim=1).indices
    ids = torch.cat([ids[:, :15], ids[:, 16:]], 1).sort(1).values.to(torch.int32)
    assert any("leaves out rank value" in problem for problem in check_ids(ids, case.logits, case.bias))


def test_the_wrong_one_of_a_tie_is_found():
    logits, bias = torch.zeros(2, 896), torch.zeros(896)
    ids = torch.cat([torch.arange(15), torch.tensor([16])]).to(torch.int32).repeat(2, 1)
    assert check_ids(ids, logits, bias)[0] == "topk_ids[0]: takes 16 but not 15, which ties with it"


def test_a_nan_taken_before_a_number_is_found():
    logits, bias = torch.full((1, 896), -math.inf), torch.zeros(896)
    logits[0, 0] = math.nan
    assert check_ids(torch.arange(16, dtype=torch.int32)[None], logits, bias)
    assert check_ids(torch.arange(1, 17, dtype=torch.int32)[None], logits, bias) == []


def test_ranks_within_the_tolerance_may_swap():
    logits, bias = torch.zeros(1, 896), torch.zeros(896)
    bias[:16] = 0.25
    bias[16] = 0.25 + 2**-24
    ids = torch.arange(16, dtype=torch.int32)[None]
    assert reference.select(logits.sigmoid() + bias, 16)[0, -1] == 16
    assert check_ids(ids, logits, bias) == []


def test_denormal_scores_may_be_a_step_off():
    case = adversarial_case("tiny", 64, 384, torch.float32, CPU)
    score, _ = reference.selected_scores(case.logits, case.bias)
    _, ids = reference.route(case.logits, case.bias, 8, True, 1.0)
    taken = score.gather(1, ids.long())
    stepped = torch.where(taken < 2.0**-126, taken + 2.0**-149, taken)
    weights = reference.weights(stepped, True, 1.0)
    assert check_weights(weights, ids, case.logits, case.bias, True, 1.0) == []
    assert check_weights(weights + 1e-3, ids, case.logits, case.bias, True, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_adversaries_pass_with_the_reference(kind, dtype):
    case = adversarial_case(kind, 5, 896, dtype, CPU)
    for settings in (Settings(), Settings(16, False, 2.5), Settings(24, local_experts=range(8, 200, 3))):
        assert check_router(case, settings) == []


def test_mixed_batches_and_plans_pass_with_the_reference():
    assert check_router(mixed_batch(40, 384, torch.float32, CPU), Settings(16)) == []
    ids = torch.randint(-1, 50, (64, 8), dtype=torch.int32)
    assert check_route_plan(ids, 48, 8) == []
    assert check_route_plan(ids, 48, 8, range(10, 20)) == []


def test_a_plan_for_other_local_experts_is_found():
    ids = torch.randint(0, 48, (64, 8), dtype=torch.int32)
    local = reference.route_plan(ids, 48, 8)
    assert check_plan(local, ids, 48, 8, torch.arange(47, -1, -1, dtype=torch.int32))


def test_same_bits():
    nan, zero = torch.tensor([math.nan]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, torch.zeros(2))


def test_differing_tensors_are_named():
    nan, ints = torch.tensor([math.nan, 0.0]), torch.arange(3, dtype=torch.int32)
    names = ("nan", "zero", "ints", "shape", "type", "empty")
    mine = [nan, torch.zeros(2), ints, ints, ints, ints[:0]]
    theirs = [nan.clone(), -torch.zeros(2), ints + 1, ints[:2], ints.long(), ints[:0].clone()]
    assert differing(names, mine, theirs) == ["zero", "ints", "shape", "type"]
    assert differing([], [], []) == []


@pytest.mark.parametrize("expert_map", [None, torch.arange(47, -1, -1, dtype=torch.int32)])
def test_one_copy_takes_a_plan_to_the_host(expert_map):
    ids = torch.randint(-1, 50, (9, 8), dtype=torch.int32)
    plan = spacious_plan(9, 8, 48, 8, CPU)
    reference.fill_route_plan(plan, ids, 48, 8, expert_map)
    copied = compare._on_host(plan, ids, expert_map)
    assert check_plan(copied[0], copied[1], 48, 8, copied[2]) == []
    assert all(torch.equal(a, b) for a, b in zip(copied[0], plan, strict=True))


def test_ids_and_weights_that_were_right_are_judged_once(monkeypatch):
    case, judged = normal_case(33, 384, torch.float32, CPU), []
    monkeypatch.setattr(router, "check_ids", lambda *given: judged.append(given) or check_ids(*given))
    several = [Settings(8), Settings(16, local_experts=range(9)), Settings(8, False, 2.5), Settings(24)]
    assert check_router_with(case, several) == []
    assert len(judged) == 2, "once a way to weight"
    right = run_prepared(case, several[0])
    for change, message in FAULTS.values():
        written = run_prepared(case, several[0])
        change(written)
        problems = router_problems(case, several[0], written, right)
        assert any(re.search(message, problem) for problem in problems), problems
