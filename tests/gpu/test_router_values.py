"""The fused router on a GPU against the reference: every cell, every small count, random counts, hostile rows."""

from __future__ import annotations

import random

import pytest
import torch

from chord.checks.compare import POISON
from chord.checks.inputs import (
    ADVERSARIES,
    ODD_TOKEN_COUNTS,
    RUN_TIME_BLOCK_M,
    SELECTIONS,
    SPECIAL_BLOCK_M,
    TOKEN_COUNTS,
    RouterCase,
    adversarial_case,
    mixed_batch,
    normal_case,
)
from chord.checks.router import (
    Settings,
    check_router,
    check_router_with,
    compare_programs,
    router_problems,
    run_eager,
    run_prepared,
    spacious_plan,
)
from chord.router import fused_router, prepare_fused_router, reference
from chord.router.experts import expert_map_of
from chord.router.plan import max_route_blocks

pytestmark = pytest.mark.gpu

EXPERTS = [experts for experts, _ in SELECTIONS]
DTYPES = [torch.float32, torch.bfloat16]
over_domain = [pytest.mark.parametrize("experts", EXPERTS), pytest.mark.parametrize("dtype", DTYPES)]


def each_domain(function):
    for mark in over_domain:
        function = mark(function)
    return function


@each_domain
def test_all_cells_and_odd_counts(experts, dtype, device, expect_none):
    expect_none(
        problem
        for tokens in sorted({*TOKEN_COUNTS, *ODD_TOKEN_COUNTS})
        for problem in check_router_with(normal_case(tokens, experts, dtype, device), map(Settings, SPECIAL_BLOCK_M))
    )


@each_domain
@pytest.mark.parametrize("block_m", SPECIAL_BLOCK_M)
def test_every_count_to_300(experts, dtype, block_m, device, expect_none):
    """The first rows of 300. Ids and weights with the bits of the 300's, once those are right, are right (R12)."""
    whole, settings = normal_case(300, experts, dtype, device), Settings(block_m)
    most = run_prepared(whole, settings)
    problems = router_problems(whole, settings, most)
    for tokens in range(1, 300):
        case = RouterCase(f"rows_{tokens}", whole.logits[:tokens], whole.bias)
        right = most._replace(topk_weights=most.topk_weights[:tokens], topk_ids=most.topk_ids[:tokens])
        problems += check_router(case, settings, right=None if problems else right)
    expect_none(problems)


@each_domain
def test_random_counts(experts, dtype, device, expect_none):
    draw = random.Random(experts)
    counts = [draw.randint(301, 8192) for _ in range(24)] + [draw.randint(8193, 100_000) for _ in range(3)] + [100_000]
    expect_none(
        problem
        for tokens in counts
        for problem in check_router(
            normal_case(tokens, experts, dtype, device), Settings(draw.choice([*SPECIAL_BLOCK_M, *RUN_TIME_BLOCK_M]))
        )
    )


def test_the_largest_count(device, expect_none):
    expect_none(check_router(normal_case(1 << 20, 384, torch.bfloat16, device), Settings(64)))


@each_domain
def test_run_time_block_m(experts, dtype, device, expect_none):
    expect_none(
        problem
        for tokens in (0, 1, 2, 3, 16, 31, 100, 257, 1025, 2500, 8192)
        for problem in check_router_with(normal_case(tokens, experts, dtype, device), map(Settings, RUN_TIME_BLOCK_M))
    )


@each_domain
@pytest.mark.parametrize("kind", ADVERSARIES)
def test_hostile_rows(kind, experts, dtype, device, expect_none):
    expect_none(
        problem
        for tokens in (1, 2, 4, 7, 16, 33, 128, 300, 1025, 4097)
        for problem in check_router(
            adversarial_case(kind, tokens, experts, dtype, device), Settings(8 if tokens % 2 else 16)
        )
    )


@each_domain
def test_hostile_rows_among_others(experts, dtype, device, expect_none):
    expect_none(
        problem
        for tokens in (16, 32, 100, 700, 3000, 7393, 8192)
        for problem in check_router(mixed_batch(tokens, experts, dtype, device), Settings(8))
    )


def test_many_tokens_on_the_same_experts(device, expect_none):
    """Counts reach the number of tokens: no counter may be narrower than that."""
    expect_none(
        problem
        for tokens in (256, 2048, 7392, 8192, 70_000)
        for kind in ("all_equal", "hot_experts")
        for problem in check_router(adversarial_case(kind, tokens, 896, torch.float32, device), Settings(8))
    )


@pytest.mark.parametrize("tokens", [1, 33, 4097])
def test_r11_ties(tokens, device):
    zeros, bias = torch.zeros(tokens, 896, device=device), torch.zeros(896, device=device)

    def ids():
        prepared = prepare_fused_router(zeros, bias, top_k=16, block_m=8)
        prepared()
        return prepared.topk_ids

    first = torch.arange(16, device=device)
    assert (ids() == first).all()
    bias[[3, 895]] = 0.1
    assert (ids() == torch.tensor([*range(15), 895], device=device)).all()
    bias.zero_()
    zeros[:, 1::2] = -0.0
    assert (ids() == first).all()


@each_domain
def test_r12_a_row_does_not_depend_on_its_batch(experts, dtype, device, expect_none):
    """All arms agree in every bit, so a row keeps its bits at any token count, whatever the other rows hold."""
    case = normal_case(1025, experts, dtype, device)
    alone = run_prepared(RouterCase("alone", case.logits[:1].clone(), case.bias), Settings())
    problems = []
    for others in (1, 3, 7, 15, 31, 64, 127, 300, 600, 1024):
        for fill in (None, 1e30, float("nan")):
            logits = case.logits[: others + 1].clone()
            if fill is not None:
                logits[1:] = fill
            written = run_prepared(RouterCase("batch", logits, case.bias), Settings())
            if not torch.equal(written.topk_weights[0].view(torch.int32), alone.topk_weights[0].view(torch.int32)):
                problems.append(f"the weights of row 0 change among {others} others filled with {fill}")
            if not torch.equal(written.topk_ids[0], alone.topk_ids[0]):
                problems.append(f"the ids of row 0 change among {others} others filled with {fill}")
    expect_none(problems)


@each_domain
@pytest.mark.parametrize("block_m", [8, 16, 40])
def test_r12_all_programs_agree_in_every_bit(experts, dtype, block_m, device, expect_none):
    expect_none(
        problem
        for tokens in (0, 1, 2, 3, 4, 8, 16, 17, 32, 100, 257, 513, 1024, 1500, 2048, 3001, 8192)
        for case in (normal_case(tokens, experts, dtype, device), mixed_batch(tokens, experts, dtype, device))
        for problem in compare_programs(case, Settings(block_m))
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_r13_scale_and_bias(renormalize, factor, device, expect_none):
    problems = []
    for tokens in (1, 16, 33, 300, 3000):
        case = adversarial_case("one_hot", tokens, 896, torch.float32, device)
        settings = Settings(8, renormalize, factor)
        written = run_prepared(case, settings)
        problems += router_problems(case, settings, written)
        score = reference.scores(case.logits).gather(1, written.topk_ids.long())
        want = (score / score.sum(1, keepdim=True) if renormalize else score) * factor
        torch.testing.assert_close(written.topk_weights, want, rtol=1e-5, atol=1e-6)
        assert (written.topk_ids == 5).any(1).all()
        assert (written.topk_weights[written.topk_ids == 5] < 1e-7).all()
    expect_none(problems)


@each_domain
def test_local_experts(experts, dtype, device, expect_none):
    scattered = torch.full((experts,), -1, dtype=torch.int32, device=device)
    scattered[torch.randperm(experts, device=device)[:48]] = torch.arange(48, dtype=torch.int32, device=device)
    wild = expert_map_of(range(0, experts, 2), experts, device)
    wild[1::4] = experts + 5
    wild[3::4] = -7
    several = [
        Settings(block_m, local_experts=local, num_local_experts=count)
        for local, count in (
            (range(48), None),
            (range(experts - 112, experts), None),
            (range(7, 8), None),
            (range(experts), None),
            (scattered, 48),
            (wild, experts // 2),
        )
        for block_m in (8, 48)
    ]
    expect_none(
        problem
        for tokens in (0, 1, 2, 8, 16, 30, 128, 300, 1025, 2500, 8192, 20_000)
        for problem in check_router_with(normal_case(tokens, experts, dtype, device), several)
    )


def test_tokens_without_a_local_expert(device, expect_none):
    problems = []
    for tokens in (1, 4, 100, 3000):
        case = normal_case(tokens, 896, torch.float32, device)
        case.bias[:16] += 10.0
        settings = Settings(8, local_experts=range(500, 600))
        written = run_prepared(case, settings)
        problems += router_problems(case, settings, written)
        assert written.plan.num_tokens_post_padded.tolist() == [0]
    expect_none(problems)


@pytest.mark.parametrize("tokens", [1, 2, 30, 200, 500, 1000, 8192, 20_000])
def test_a_map_that_repeats_local_ids_stays_inside_its_plan(tokens, device):
    """Such a map breaks the contract and its plan means nothing, but no arm may write outside the tensors."""
    case = normal_case(tokens, 896, torch.float32, device)
    for locals_ in (1, 3, 40):
        repeating = torch.randint(locals_, (896,), dtype=torch.int32, device=device)
        for block_m in (8, 48):
            blocks = max_route_blocks(tokens, 16, locals_, block_m)
            plan = spacious_plan(tokens, 16, locals_, block_m, device, spare=64)
            fused_router(
                case.logits,
                case.bias,
                top_k=16,
                block_m=block_m,
                local_experts=repeating,
                num_local_experts=locals_,
                plan=plan,
            )
            assert (plan.sorted_token_ids[blocks * block_m :] == POISON).all()
            assert (plan.expert_ids[blocks:] == POISON).all()


@pytest.mark.parametrize("block_m", [8, 24])
def test_r14_no_tokens(block_m, device, expect_none):
    """The extent is written as 0, the counts as 0; nothing else is touched, and the device goes on."""
    case = normal_case(0, 896, torch.float32, device)
    written = run_eager(case, Settings(block_m))
    assert written.topk_ids.shape == written.topk_weights.shape == (0, 16)
    assert written.plan.num_tokens_post_padded.tolist() == [0]
    expect_none(router_problems(case, Settings(block_m), written))
    assert torch.ones(3, device=device).sum().item() == 3


def test_eager_calls_equal_prepared_ones(device, expect_none):
    problems = []
    for tokens in (1, 5, 40, 400, 4000):
        case = normal_case(tokens, 384, torch.bfloat16, device)
        for _ in range(3):  # a self-resetting workspace is reused from the second call on
            problems += router_problems(case, Settings(16), run_eager(case, Settings(16)))
        problems += router_problems(case, Settings(16), run_prepared(case, Settings(16), launches=3))
    expect_none(problems)
