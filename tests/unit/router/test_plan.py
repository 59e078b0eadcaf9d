"""The plan against a loop that appends pairs, its invariants, and the capacity function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chord.router as router
from chord.checks.compare import POISON, check_plan
from chord.checks.router import spacious_plan
from chord.router import reference
from chord.router.experts import expert_map_of

CPU = torch.device("cpu")


def brute_force_plan(ids, experts, local_of, block_m):
    """Plan of nested lists of ids as Python lists: (sorted, expert_ids, counts, offsets)."""
    pairs = sum(len(row) for row in ids)
    top_k = len(ids[0]) if ids else 0
    lists = [[] for _ in range(experts)]
    for token, row in enumerate(ids):
        for position, expert in enumerate(row):
            local = local_of(expert)
            if local is not None:
                lists[local].append(token * top_k + position)
    slots, blocks, offsets = [], [], []
    for local, members in enumerate(lists):
        offsets.append(len(slots))
        padded = -(-len(members) // block_m) * block_m
        slots += members + [pairs] * (padded - len(members))
        blocks += [local] * (padded // block_m)
    return slots, blocks, [len(members) for members in lists], [*offsets, len(slots)]


@st.composite
def plans(draw):
    experts = draw(st.integers(1, 20))
    top_k = draw(st.integers(1, 5))
    tokens = draw(st.integers(0, 30))
    ids = draw(
        st.lists(
            st.lists(st.integers(-2, experts + 1), min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens
        )
    )
    block_m = draw(st.sampled_from([8, 16, 24, 256]))
    local = draw(st.none() | st.lists(st.integers(-1, experts - 1), min_size=experts, max_size=experts))
    return experts, top_k, ids, block_m, local


@settings(deadline=None, max_examples=300)
@given(plans())
def test_plan_equals_brute_force(drawn):
    experts, top_k, ids, block_m, local = drawn
    num_local = experts if local is None else max(1, max(local) + 1)
    expert_map = None if local is None else torch.tensor(local, dtype=torch.int32)

    def local_of(expert):
        if not 0 <= expert < experts:
            return None
        if local is None:
            return expert
        return local[expert] if local[expert] >= 0 else None

    slots, blocks, counts, offsets = brute_force_plan(ids, num_local, local_of, block_m)
    topk_ids = torch.tensor(ids, dtype=torch.int32).reshape(-1, top_k)
    plan = spacious_plan(len(ids), top_k, num_local, block_m, CPU)
    capacity = plan.expert_ids.numel()
    reference.fill_route_plan(plan, topk_ids, experts, block_m, expert_map)
    assert plan.num_tokens_post_padded.tolist() == [len(slots)]
    assert plan.sorted_token_ids.tolist() == slots + [POISON] * (capacity * block_m - len(slots))
    assert plan.expert_ids.tolist() == blocks + [POISON] * (capacity - len(blocks))
    assert plan.expert_counts.tolist() == counts == plan.expert_scatter_offsets.tolist()
    assert plan.expert_offsets.tolist() == offsets


@settings(deadline=None)
@given(plans())
def test_route_plan_operator_equals_reference(drawn):
    experts, top_k, ids, block_m, local = drawn
    expert_map = None if local is None or max(local) < 0 else torch.tensor(local, dtype=torch.int32)
    topk_ids = torch.tensor(ids, dtype=torch.int32).reshape(-1, top_k)
    num_local = experts if expert_map is None else max(local) + 1
    plan = spacious_plan(len(ids), top_k, num_local, block_m, CPU)
    got = router.route_plan(topk_ids, experts, block_m, local_experts=expert_map, plan=plan)
    assert got is plan
    assert check_plan(plan, topk_ids, experts, block_m, expert_map) == []


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 30), st.sampled_from([8, 16, 64]), st.randoms())
def test_capacity_covers_every_routing(tokens, top_k, experts, block_m, random):
    ids = [[random.randrange(experts) for _ in range(top_k)] for _ in range(tokens)]
    slots, blocks, _, _ = brute_force_plan(ids, experts, lambda expert: expert, block_m)
    assert len(blocks) <= router.max_route_blocks(tokens, top_k, experts, block_m)
    assert len(slots) == len(blocks) * block_m


@pytest.mark.parametrize(
    ("tokens", "block_m", "blocks"),
    [(1, 8, 8), (1, 16, 8), (1, 64, 8), (17, 8, 136), (17, 16, 136), (17, 64, 136), (49, 8, 384 + 1), (0, 8, 0)],
)
def test_r16_capacity_of_384_experts(tokens, block_m, blocks):
    assert router.max_route_blocks(tokens, 8, 384, block_m) == blocks
    plan = router.allocate_route_plan(tokens, top_k=8, num_experts=384, block_m=block_m, device="cpu")
    assert plan.sorted_token_ids.shape == (blocks * block_m,)
    assert plan.expert_ids.shape == (blocks,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1, 8, 384, 0), "block_m: expected 8 to 256, got 0"),
        ((1, 8, 384, 12), "block_m: expected a multiple of 8"),
        ((-1, 8, 384, 8), "num_tokens: expected 0 to 16777216, got -1"),
        ((1, 0, 384, 8), "top_k: expected 1 to 1024, got 0"),
        ((1, 8, 0, 8), "num_experts: expected 1 to 1024, got 0"),
    ],
)
def test_capacity_of_sizes_that_are_none(arguments, said):
    with pytest.raises(ValueError, match=said):
        router.max_route_blocks(*arguments)


@pytest.mark.parametrize("block_m", [8, 16, 64])
def test_r16_every_pair_on_another_expert_fills_the_plan(block_m):
    ids = torch.randperm(384)[: 17 * 8].reshape(17, 8).to(torch.int32)
    plan = router.route_plan(ids, 384, block_m)
    assert plan.num_tokens_post_padded.item() == plan.sorted_token_ids.numel() == 136 * block_m
    padding = plan.sorted_token_ids.reshape(136, block_m)[:, 1:]
    assert (padding >= 17 * 8).all()


def test_r16_buffer_one_slot_short():
    ids = torch.arange(136, dtype=torch.int32).reshape(17, 8)
    plan = router.allocate_route_plan(17, top_k=8, num_experts=384, block_m=16, device="cpu")
    with pytest.raises(ValueError, match=r"plan.sorted_token_ids: expected at least 2176 entries .* got 2175"):
        router.route_plan(ids, 384, 16, plan=plan._replace(sorted_token_ids=plan.sorted_token_ids[:-1]))
    with pytest.raises(ValueError, match=r"plan.expert_ids: expected at least 136 entries .* got 135"):
        router.route_plan(ids, 384, 16, plan=plan._replace(expert_ids=plan.expert_ids[:-1]))


def test_r15_absent_experts_add_nothing():
    ids = torch.randint(0, 48, (64, 8), dtype=torch.int32)
    absent = torch.rand(64, 8) < 0.6
    absent[5] = True
    masked = ids.masked_fill(absent, -1)
    plan = router.route_plan(masked, 48, 8)
    kept = plan.sorted_token_ids[: plan.num_tokens_post_padded.item()]
    assert sorted(kept[kept < 512].tolist()) == (~absent).flatten().nonzero().flatten().tolist()
    assert plan.expert_counts.sum() == (~absent).sum()


@pytest.mark.parametrize("outside", [-1, -2, 48, 2**31 - 1, -(2**31)])
def test_r15_every_id_outside_is_not_counted(outside):
    plan = router.route_plan(torch.full((64, 8), outside, dtype=torch.int32), 48, 16)
    assert plan.num_tokens_post_padded.tolist() == [0]
    assert plan.expert_counts.tolist() == [0] * 48
    assert plan.expert_offsets.tolist() == [0] * 49


@pytest.mark.parametrize("local", [range(4), range(5, 20), range(3, 17, 4), range(19, 2, -1), range(16, 2, -3)])
def test_expert_map_of_a_range(local):
    got = expert_map_of(local, 20, CPU).tolist()
    assert got == [local.index(expert) if expert in local else -1 for expert in range(20)]


def test_local_experts_as_range_and_map_agree():
    ids = torch.randint(0, 384, (40, 8), dtype=torch.int32)
    by_range = router.route_plan(ids, 384, 8, local_experts=range(48, 96))
    by_map = router.route_plan(ids, 384, 8, local_experts=expert_map_of(range(48, 96), 384, CPU))
    extent = by_range.num_tokens_post_padded.item()
    assert by_range.expert_counts.shape == (48,)
    assert torch.equal(by_range.sorted_token_ids[:extent], by_map.sorted_token_ids[:extent])
    assert torch.equal(by_range.expert_offsets, by_map.expert_offsets)


def test_count_of_a_map_follows_its_contents():
    ids = torch.zeros(4, 8, dtype=torch.int32)
    local = torch.full((48,), -1, dtype=torch.int32)
    local[:5] = torch.arange(5, dtype=torch.int32)
    assert router.route_plan(ids, 48, 8, local_experts=local).expert_counts.shape == (5,)
    local[5] = 5
    assert router.route_plan(ids, 48, 8, local_experts=local).expert_counts.shape == (6,)
    assert router.route_plan(ids, 48, 8, local_experts=local, num_local_experts=9).expert_counts.shape == (9,)


def test_tokens_without_local_experts():
    logits, bias = torch.randn(6, 384), torch.zeros(384)
    bias[:8] = 10.0
    output = router.fused_router(logits, bias, top_k=8, block_m=8, local_experts=range(300, 384))
    assert output.topk_ids.tolist() == [list(range(8))] * 6
    assert output.plan.num_tokens_post_padded.tolist() == [0]
    assert output.plan.expert_counts.tolist() == [0] * 84
