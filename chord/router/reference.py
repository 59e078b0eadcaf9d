"""Plain torch reference of both router operators: dull on purpose, the same code on CPU and GPU tensors.

It is what the CPU implementations of the custom ops run, and what the kernels are checked against.
"""

from __future__ import annotations

import torch

from chord.router.plan import RoutePlan, empty_route_plan

_ROWS_AT_ONCE = 1 << 16  # bounds the float64 and int64 temporaries to about half a gigabyte each
_ID_BITS = 10  # expert ids are below 1024


def scores(logits: torch.Tensor) -> torch.Tensor:
    """sigmoid(logits) as float32, correctly rounded: computed in float64, where exp(-|x|) cannot overflow.

    Tiny scores stay denormal; +inf gives 1, -inf gives 0, NaN stays NaN.
    """
    x = logits.to(torch.float64)
    t = torch.exp(-x.abs())
    return (torch.where(x >= 0, torch.ones_like(t), t) / (1 + t)).to(torch.float32)


def rank_keys(ranks: torch.Tensor) -> torch.Tensor:
    """[M, E] float32 rank values -> [M, E] int64 keys, all different in a row: a larger key is selected first.

    The upper part orders the values (NaN below -inf, -0 equal to +0), the lower part puts the lower id first.
    """
    bits = (ranks + 0.0).view(torch.int32).to(torch.int64)  # -0.0 + 0.0 is +0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    ordered = torch.where(ranks.isnan(), torch.full_like(ordered, -(1 << 31)), ordered)
    ids = torch.arange(ranks.shape[1], device=ranks.device)
    return ordered * (1 << _ID_BITS) + ((1 << _ID_BITS) - 1 - ids)


def selected_scores(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, ranks), both [M, E] float32; the score of an expert whose rank value is NaN is 0."""
    score = scores(logits)
    ranks = score + bias
    return torch.where(ranks.isnan(), torch.zeros_like(score), score), ranks


def select(ranks: torch.Tensor, top_k: int) -> torch.Tensor:
    """[M, E] rank values -> [M, top_k] int32 ids of the largest, ascending by id."""
    chosen = rank_keys(ranks).topk(top_k, dim=1, sorted=False).indices  # no two keys are equal: no tie to break
    return chosen.sort(dim=1).values.to(torch.int32)


def weights(chosen: torch.Tensor, renormalize: bool, routed_scaling_factor: float) -> torch.Tensor:
    """[M, k] scores in ascending id order -> [M, k] weights. The sum is float32, one score after the other from 0."""
    if not renormalize:
        return chosen * routed_scaling_factor
    total = torch.zeros_like(chosen[:, 0])
    for route in range(chosen.shape[1]):
        total = total + chosen[:, route]
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    return chosen / divisor[:, None] * routed_scaling_factor


def route(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, renormalize: bool, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing half: (topk_weights [M, k] float32, topk_ids [M, k] int32)."""
    parts = []
    for rows in torch.split(logits, _ROWS_AT_ONCE):
        score, ranks = selected_scores(rows, bias)
        ids = select(ranks, top_k)
        parts.append((weights(score.gather(1, ids.long()), renormalize, routed_scaling_factor), ids))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def local_ids(
    topk_ids: torch.Tensor, num_experts: int, num_local_experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """[M, k] global ids -> [M * k] int64 local ids; -1 where the id is out of range or its expert is not local."""
    ids = topk_ids.reshape(-1).to(torch.int64)
    known = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        ids = expert_map.to(torch.int64)[ids.clamp(0, num_experts - 1)]
    known &= (ids >= 0) & (ids < num_local_experts)
    return torch.where(known, ids, torch.full_like(ids, -1))


def fill_route_plan(
    plan: RoutePlan, topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None = None
) -> None:
    """Writes the plan of the given ids into a plan's buffers, leaving entries beyond the valid extent alone."""
    num_local = plan.expert_counts.numel()
    pairs = topk_ids.numel()
    local = local_ids(topk_ids, num_experts, num_local, expert_map)
    pair = torch.arange(pairs, device=local.device)[local >= 0]
    expert = local[local >= 0]
    order = expert.argsort(stable=True)  # experts ascending, pairs ascending inside an expert
    pair, expert = pair[order], expert[order]

    counts = torch.zeros(num_local, dtype=torch.int64, device=local.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    blocks = (counts + block_m - 1) // block_m
    ends = (blocks * block_m).cumsum(0)
    starts = ends - blocks * block_m
    rank = torch.arange(expert.numel(), device=local.device) - (counts.cumsum(0) - counts)[expert]
    extent = int(ends[-1])

    plan.sorted_token_ids[:extent] = pairs
    plan.sorted_token_ids[starts[expert] + rank] = pair.to(torch.int32)
    experts = torch.arange(num_local, dtype=torch.int32, device=local.device)
    plan.expert_ids[: extent // block_m] = experts.repeat_interleave(blocks)
    plan.num_tokens_post_padded.fill_(extent)
    plan.expert_counts.copy_(counts)
    plan.expert_offsets[:-1] = starts.to(torch.int32)
    plan.expert_offsets[-1:] = extent
    plan.expert_scatter_offsets.copy_(counts)


def route_plan(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    *,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
) -> RoutePlan:
    """The reference of `chord.route_plan` with a plan of its own. Arguments are taken as valid."""
    num_local = num_experts if num_local_experts is None else num_local_experts
    plan = empty_route_plan(topk_ids.shape[0], topk_ids.shape[1], num_local, block_m, topk_ids.device)
    fill_route_plan(plan, topk_ids, num_experts, block_m, expert_map)
    return plan


def fused_router(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    block_m: int,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, RoutePlan]:
    """The reference of `chord.fused_router`: any number of experts up to 1024, any top_k. Arguments are taken as
    valid.
    """
    topk_weights, topk_ids = route(logits, bias, top_k, renormalize, routed_scaling_factor)
    plan = route_plan(topk_ids, logits.shape[1], block_m, expert_map=expert_map, num_local_experts=num_local_experts)
    return topk_weights, topk_ids, plan
