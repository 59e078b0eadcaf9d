"""chord.route_plan on a GPU: any ids, any expert count, absent and foreign experts."""

from __future__ import annotations

import pytest
import torch

from chord.checks.compare import POISON
from chord.checks.inputs import expert_parallel_ids
from chord.checks.router import check_route_plan, spacious_plan
from chord.router import allocate_route_plan, route_plan
from chord.router.experts import expert_map_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("experts", [1, 8, 48, 256, 384, 896, 1000, 1024])
@pytest.mark.parametrize("top_k", [1, 8, 16])
def test_plans_of_random_ids(experts, top_k, device, expect_none):
    expect_none(
        problem
        for tokens in (0, 1, 2, 17, 64, 300, 1000, 4097, 20_000)
        for block_m in (8, 16, 64, 256)
        for problem in check_route_plan(
            expert_parallel_ids(tokens, top_k, experts, device, absent=0.0 if tokens % 2 else 0.6), experts, block_m
        )
    )


def test_every_small_count(device, expect_none):
    ids = expert_parallel_ids(300, 8, 384, device, absent=0.3)
    expect_none(
        problem
        for tokens in range(301)
        for problem in check_route_plan(ids[:tokens].contiguous(), 384, 8 + tokens % 3 * 8)
    )


def test_one_expert_takes_all(device, expect_none):
    expect_none(
        problem
        for tokens in (1, 100, 10_000, 200_000)
        for expert in (0, 383, 1023)
        for problem in check_route_plan(torch.full((tokens, 8), expert, dtype=torch.int32, device=device), 1024, 16)
    )


def test_the_most_pairs(device, expect_none):
    ids = torch.randint(0, 896, (1 << 20, 16), dtype=torch.int32, device=device)
    expect_none(check_route_plan(ids, 896, 64))


def test_r15_experts_that_live_elsewhere(device, expect_none):
    ids = expert_parallel_ids(64, 8, 48, device)
    hostile = ids.clone()
    hostile[1] = 48
    hostile[2] = -2
    hostile[3, ::2] = torch.tensor([2**31 - 1, -(2**31), 1 << 20, -1], dtype=torch.int32, device=device)
    nobody = torch.full((64, 8), -1, dtype=torch.int32, device=device)
    expect_none(problem for case in (ids, hostile, nobody) for problem in check_route_plan(case, 48, 8))
    plan = route_plan(nobody, 48, 8)
    assert plan.num_tokens_post_padded.tolist() == [0]
    assert plan.expert_counts.sum().item() == 0


def test_local_experts(device, expect_none):
    ids = expert_parallel_ids(3000, 8, 384, device, absent=0.2)
    wild = expert_map_of(range(100, 148), 384, device)
    wild[:50] = 48
    wild[50:100] = -9
    expect_none(
        problem
        for tokens in (0, 1, 64, 3000)
        for local, count in ((range(48), None), (range(336, 384), None), (wild, 48))
        for problem in check_route_plan(ids[:tokens].contiguous(), 384, 16, local, count)
    )


@pytest.mark.parametrize("block_m", [8, 16, 64])
@pytest.mark.parametrize("tokens", [1, 17])
def test_r16_worst_case_fills_the_plan_exactly(tokens, block_m, device):
    ids = torch.randperm(384, device=device)[: tokens * 8].reshape(tokens, 8).to(torch.int32)
    plan = route_plan(ids, 384, block_m)
    assert plan.num_tokens_post_padded.item() == plan.sorted_token_ids.numel() == tokens * 8 * block_m
    assert (plan.sorted_token_ids.reshape(-1, block_m)[:, 1:] >= tokens * 8).all()


def test_r16_short_buffers_are_refused_and_what_lies_behind_is_left(device):
    ids = torch.arange(136, dtype=torch.int32, device=device).reshape(17, 8)
    plan = allocate_route_plan(17, top_k=8, num_experts=384, block_m=16, device=device)
    with pytest.raises(ValueError, match=r"plan.sorted_token_ids: expected at least 2176"):
        route_plan(ids, 384, 16, plan=plan._replace(sorted_token_ids=plan.sorted_token_ids[:-1]))
    roomy = spacious_plan(17, 8, 384, 16, device)
    roomy.sorted_token_ids.fill_(2**31 - 1)
    route_plan(ids, 384, 16, plan=roomy)
    assert (roomy.sorted_token_ids[2176:] == 2**31 - 1).all()
    assert (roomy.expert_ids[136:] == POISON).all()


def test_the_same_plan_every_time(device):
    ids = expert_parallel_ids(5000, 8, 384, device, absent=0.1)
    first = [tensor.clone() for tensor in route_plan(ids, 384, 8, plan=spacious_plan(5000, 8, 384, 8, device))]
    for _ in range(20):
        again = route_plan(ids, 384, 8, plan=spacious_plan(5000, 8, 384, 8, device))
        assert all(torch.equal(want, got) for want, got in zip(first, again, strict=True))
