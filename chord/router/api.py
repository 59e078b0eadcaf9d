"""The router as users call it. See docs/router.md for the contract."""

from __future__ import annotations

from typing import NamedTuple

import torch

from chord._runtime import Prepared
from chord.router import launch, ops
from chord.router.experts import resolve_local_experts
from chord.router.plan import RoutePlan, empty_route_plan
from chord.router.validate import (
    MAX_EXPERTS,
    check_block_m,
    check_dense,
    check_int,
    check_router_inputs,
    check_settings,
    check_tensor,
)


class RouterOutput(NamedTuple):
    """What `chord.fused_router` returns. M tokens, k = top_k."""

    topk_weights: torch.Tensor
    """[M, k] float32, in the order of topk_ids."""
    topk_ids: torch.Tensor
    """[M, k] int32 global expert ids, ascending and distinct in each row."""
    plan: RoutePlan


def fused_router(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    block_m: int,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    local_experts: range | torch.Tensor | None = None,
    num_local_experts: int | None = None,
    plan: RoutePlan | None = None,
) -> RouterOutput:
    """From logits to weights, ids and the block-aligned plan in one call; works in CUDA graphs and torch.compile.

    logits: [M, E] float32 or bfloat16, contiguous, 16-byte aligned; 0 <= M <= 1,048,576.
    bias: [E] float32, added to the scores for the selection only.
    top_k: 16 for 896 experts, 8 for 384. block_m: a multiple of 8 up to 256.
    renormalize: divide the selected scores by their sum (by 1 where that is not positive).
    routed_scaling_factor: multiplies the weights, once, in either case; a finite float32.
    local_experts: the experts of this rank: a range of global ids, or an int32 map [E] from global to local id with -1
        for experts that live elsewhere. The plan then covers local experts alone, under local ids; topk_ids and
        topk_weights stay global and complete. A map must give each local id to one expert at most: this is not
        checked, and the plan of one that does not is meaningless.
    num_local_experts: with a map, how many local ids there are. If not given it is the plan's, else read from the map.
    plan: buffers to write instead of new ones, from `chord.allocate_route_plan`.

    CPU tensors run the plain reference. Not differentiable: results have no grad_fn, even if logits or bias require
    grad. Raises TypeError or ValueError before any launch for arguments outside this description, and chord errors
    when no verified kernel can run on the tensors' GPU.
    """
    check_settings(top_k, block_m, renormalize, routed_scaling_factor)
    expert_map, num_local = _local(local_experts, num_local_experts, logits, plan)
    check_dense("bias", bias)
    scalars = (top_k, block_m, renormalize, routed_scaling_factor, expert_map, num_local)
    if plan is None:
        topk_weights, topk_ids, *buffers = torch.ops.chord.fused_router.default(logits, bias, *scalars)
        return RouterOutput(topk_weights, topk_ids, RoutePlan(*buffers))
    topk_weights, topk_ids = ops.empty_results(logits, top_k)
    torch.ops.chord.fused_router_out.default(logits, bias, *scalars, topk_weights, topk_ids, *plan)
    return RouterOutput(topk_weights, topk_ids, plan)


def route_plan(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    *,
    local_experts: range | torch.Tensor | None = None,
    num_local_experts: int | None = None,
    plan: RoutePlan | None = None,
) -> RoutePlan:
    """The block-aligned plan of given ids (what moe_align_block_size does), deterministic, one call.

    topk_ids: [M, k] int32, contiguous, any order, repeats allowed. An id outside 0..num_experts-1, such as -1, counts
        nowhere: its pair does not appear in the plan.
    num_experts: 1 to 1024. block_m: a multiple of 8 up to 256. The other arguments are those of `chord.fused_router`.
    """
    _check_plan_type(plan)
    check_tensor("topk_ids", topk_ids, (torch.int32,), (None, None))
    check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    check_block_m(block_m)
    if plan is not None and isinstance(local_experts, torch.Tensor) and num_local_experts is None:
        num_local_experts = plan.expert_counts.numel()
    expert_map, num_local = resolve_local_experts(local_experts, num_experts, topk_ids.device, num_local_experts)
    arguments = (topk_ids, num_experts, block_m, expert_map, num_local)
    if plan is None:
        return RoutePlan(*torch.ops.chord.route_plan.default(*arguments))
    torch.ops.chord.route_plan_out.default(*arguments, *plan)
    return plan


class PreparedFusedRouter:
    """A fused router bound to its buffers: calling it launches the kernels again on torch's current stream.

    A call reads logits and bias as they are then, writes `topk_weights`, `topk_ids` and `plan`, allocates nothing and
    synchronises nothing. Made by `chord.prepare_fused_router`. One instance must not run on two streams at once: both
    runs would write the same buffers.
    """

    __slots__ = ("launch", "plan", "program", "topk_ids", "topk_weights")

    def __init__(self, prepared: Prepared, topk_weights: torch.Tensor, topk_ids: torch.Tensor, plan: RoutePlan) -> None:
        self.launch = prepared.launch
        """The bare launch, which keeps the buffers alive by itself; calling it skips one Python frame."""
        self.program = prepared.program
        """Name of the program that runs; "reference" on a CPU."""
        self.topk_weights = topk_weights
        self.topk_ids = topk_ids
        self.plan = plan

    def __call__(self) -> None:
        self.launch()


def prepare_fused_router(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    block_m: int,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    local_experts: range | torch.Tensor | None = None,
    num_local_experts: int | None = None,
    plan: RoutePlan | None = None,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    program: str | None = None,
) -> PreparedFusedRouter:
    """Checks, looks up, verifies and loads once; the result launches on the same buffers as often as it is called.

    Arguments as for `chord.fused_router`; topk_weights and topk_ids may be given too. `program` names a program to run
    instead of the routed one (for measurements, on a GPU); it must admit the problem.
    """
    check_settings(top_k, block_m, renormalize, routed_scaling_factor)
    expert_map, num_local = _local(local_experts, num_local_experts, logits, plan)
    check_router_inputs(logits, bias, top_k, block_m)
    num_tokens, device = logits.shape[0], logits.device
    if topk_weights is None:
        topk_weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    if topk_ids is None:
        topk_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    if plan is None:
        plan = empty_route_plan(num_tokens, top_k, num_local, block_m, device)
    ops.check_router_buffers(logits, bias, top_k, block_m, expert_map, num_local, topk_weights, topk_ids, plan)
    arguments = (logits, bias, block_m, renormalize, routed_scaling_factor, expert_map, topk_weights, topk_ids, plan)
    if logits.is_cuda:
        prepared = launch.prepare_fused_router(*arguments, program=program)
    elif program is not None:
        raise ValueError(f"program: expected None for CPU tensors, which run the reference, got {program!r}")
    else:
        prepared = Prepared(lambda: ops.run_router(*arguments), "reference")
    return PreparedFusedRouter(prepared, topk_weights, topk_ids, plan)


def _local(
    local_experts: range | torch.Tensor | None,
    num_local_experts: int | None,
    logits: torch.Tensor,
    plan: RoutePlan | None,
) -> tuple[torch.Tensor | None, int]:
    _check_plan_type(plan)
    check_tensor("logits", logits, (torch.float32, torch.bfloat16), (None, None))
    if plan is not None and isinstance(local_experts, torch.Tensor) and num_local_experts is None:
        num_local_experts = plan.expert_counts.numel()
    return resolve_local_experts(local_experts, logits.shape[1], logits.device, num_local_experts)


def _check_plan_type(plan: object) -> None:
    if plan is None:
        return
    if not isinstance(plan, RoutePlan):
        raise TypeError(f"plan: expected a chord.RoutePlan (see chord.allocate_route_plan), got {type(plan).__name__}")
    for name, tensor in zip(plan._fields, plan, strict=True):
        check_dense(f"plan.{name}", tensor)
