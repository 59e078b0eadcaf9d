"""The torch custom ops chord::fused_router and chord::route_plan, and their variants that write a caller's buffers.

All are registered for CUDA (the kernels), CPU (the plain reference) and fake tensors (torch.compile, export). None is
differentiable: results have no grad_fn, whatever the inputs require and wherever they are. Expert maps are passed as
tensors: api.py turns ranges into maps before it calls an op.
"""

from __future__ import annotations

import torch

from chord.router import launch, reference
from chord.router.plan import RoutePlan, empty_route_plan
from chord.router.validate import (
    check_devices,
    check_experts,
    check_factor,
    check_memory,
    check_plan,
    check_plan_inputs,
    check_results,
    check_router_inputs,
    plan_tensors,
)

_PLAN = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"
_PLAN_OUT = (
    "Tensor(c!) sorted_token_ids, Tensor(d!) expert_ids, Tensor(e!) num_tokens_post_padded, Tensor(f!) expert_counts,"
    " Tensor(g!) expert_offsets, Tensor(h!) expert_scatter_offsets"
)
_ROUTER_IN = (
    "Tensor logits, Tensor bias, int top_k, int block_m, bool renormalize, float routed_scaling_factor,"
    " Tensor? expert_map, int num_local_experts"
)
_PLAN_IN = "Tensor topk_ids, int num_experts, int block_m, Tensor? expert_map, int num_local_experts"

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_PLAN_NAMES = tuple(f"plan.{name}" for name in RoutePlan._fields)
_LIBRARY = torch.library.Library("chord", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    f"fused_router({_ROUTER_IN}) -> (Tensor, Tensor, {_PLAN})",
    f"fused_router_out({_ROUTER_IN}, Tensor(a!) topk_weights, Tensor(b!) topk_ids, {_PLAN_OUT}) -> ()",
    f"route_plan({_PLAN_IN}) -> ({_PLAN})",
    f"route_plan_out({_PLAN_IN}, {_PLAN_OUT}) -> ()",
):
    _LIBRARY.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]

RouterTensors = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


def empty_results(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids, [M, top_k], yet to be written."""
    shape, device = (logits.shape[0], top_k), logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def _optional(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if tensor is None else {name: tensor}


def _check_router(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, block_m: int, expert_map: torch.Tensor | None, num_local: int
) -> None:
    check_router_inputs(logits, bias, top_k, block_m)
    check_experts(expert_map, logits.shape[1], num_local)
    if expert_map is not None:
        check_devices({"logits": logits, "local_experts": expert_map})


def _check_plan(
    topk_ids: torch.Tensor, experts: int, block_m: int, expert_map: torch.Tensor | None, local: int
) -> None:
    check_plan_inputs(topk_ids, experts, block_m)
    check_experts(expert_map, experts, local)
    if expert_map is not None:
        check_devices({"topk_ids": topk_ids, "local_experts": expert_map})


# --- chord::fused_router ---------------------------------------------------------------------------------------------


def _router_new(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
) -> RouterTensors:
    """CPU and CUDA: fresh outputs cannot overlap anything, so only the inputs are checked."""
    check_factor(routed_scaling_factor)
    _check_router(logits, bias, top_k, block_m, expert_map, num_local_experts)
    check_memory({"logits": logits, "bias": bias, **_optional("local_experts", expert_map)}, {})
    topk_weights, topk_ids = empty_results(logits, top_k)
    plan = empty_route_plan(logits.shape[0], top_k, num_local_experts, block_m, logits.device)
    run_router(logits, bias, block_m, renormalize, routed_scaling_factor, expert_map, topk_weights, topk_ids, plan)
    return (topk_weights, topk_ids, *plan)


def _router_out(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *plan_buffers: torch.Tensor,
) -> None:
    check_factor(routed_scaling_factor)
    plan = RoutePlan(*plan_buffers)
    check_router_buffers(logits, bias, top_k, block_m, expert_map, num_local_experts, topk_weights, topk_ids, plan)
    run_router(logits, bias, block_m, renormalize, routed_scaling_factor, expert_map, topk_weights, topk_ids, plan)


def check_router_buffers(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    block_m: int,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: RoutePlan,
) -> None:
    """Everything that a launch into given buffers relies on. Raises TypeError or ValueError before anything is
    launched.
    """
    _check_router(logits, bias, top_k, block_m, expert_map, num_local_experts)
    check_results(topk_weights, topk_ids, logits.shape[0], top_k)
    check_plan(plan, logits.shape[0], top_k, num_local_experts, block_m)
    inputs = {"logits": logits, "bias": bias, **_optional("local_experts", expert_map)}
    outputs = {"topk_weights": topk_weights, "topk_ids": topk_ids, **plan_tensors(plan)}
    check_devices({**inputs, **outputs})
    check_memory(inputs, outputs)


def run_router(
    logits: torch.Tensor,
    bias: torch.Tensor,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: RoutePlan,
) -> None:
    """Writes all outputs from checked arguments: kernels for CUDA tensors, the reference for CPU tensors."""
    if logits.is_cuda:
        launch.fused_router(
            logits, bias, block_m, renormalize, routed_scaling_factor, expert_map, topk_weights, topk_ids, plan
        )
        return
    with torch.no_grad():  # a kernel records nothing either
        top_weights, top_ids = reference.route(logits, bias, topk_ids.shape[1], renormalize, routed_scaling_factor)
        topk_weights.copy_(top_weights)
        topk_ids.copy_(top_ids)
    reference.fill_route_plan(plan, topk_ids, logits.shape[1], block_m, expert_map)


def _router_fake(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
) -> RouterTensors:
    _check_router(logits, bias, top_k, block_m, expert_map, num_local_experts)
    plan = empty_route_plan(logits.shape[0], top_k, num_local_experts, block_m, logits.device)
    return (*empty_results(logits, top_k), *plan)


def _router_out_fake(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
    *buffers: torch.Tensor,
) -> None:
    """Capacity is left to the real call: comparing symbolic sizes here would specialise the trace."""
    _check_router(logits, bias, top_k, block_m, expert_map, num_local_experts)
    outputs = dict(zip(("topk_weights", "topk_ids", *_PLAN_NAMES), buffers, strict=True))
    check_devices({"logits": logits, "bias": bias, **outputs})


# --- chord::route_plan -----------------------------------------------------------------------------------------------


def _plan_new(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None, num_local_experts: int
) -> RoutePlan:
    _check_plan(topk_ids, num_experts, block_m, expert_map, num_local_experts)
    check_memory({"topk_ids": topk_ids, **_optional("local_experts", expert_map)}, {})
    plan = empty_route_plan(topk_ids.shape[0], topk_ids.shape[1], num_local_experts, block_m, topk_ids.device)
    _run_plan(topk_ids, num_experts, block_m, expert_map, plan)
    return plan


def _plan_out(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
    *plan_buffers: torch.Tensor,
) -> None:
    plan = RoutePlan(*plan_buffers)
    _check_plan(topk_ids, num_experts, block_m, expert_map, num_local_experts)
    check_plan(plan, topk_ids.shape[0], topk_ids.shape[1], num_local_experts, block_m)
    inputs = {"topk_ids": topk_ids, **_optional("local_experts", expert_map)}
    check_devices({**inputs, **plan_tensors(plan)})
    check_memory(inputs, plan_tensors(plan))
    _run_plan(topk_ids, num_experts, block_m, expert_map, plan)


def _run_plan(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None, plan: RoutePlan
) -> None:
    if topk_ids.is_cuda:
        launch.route_plan(topk_ids, num_experts, block_m, expert_map, plan)
    else:
        reference.fill_route_plan(plan, topk_ids, num_experts, block_m, expert_map)


def _plan_fake(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None, num_local_experts: int
) -> RoutePlan:
    _check_plan(topk_ids, num_experts, block_m, expert_map, num_local_experts)
    return empty_route_plan(topk_ids.shape[0], topk_ids.shape[1], num_local_experts, block_m, topk_ids.device)


def _plan_out_fake(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
    *plan_buffers: torch.Tensor,
) -> None:
    _check_plan(topk_ids, num_experts, block_m, expert_map, num_local_experts)
    check_devices({"topk_ids": topk_ids, **dict(zip(_PLAN_NAMES, plan_buffers, strict=True))})


for _name, _real, _fake in (
    ("fused_router", _router_new, _router_fake),
    ("fused_router_out", _router_out, _router_out_fake),
    ("route_plan", _plan_new, _plan_fake),
    ("route_plan_out", _plan_out, _plan_out_fake),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _real, _key)  # type: ignore[no-untyped-call]
    # Without this torch gives results a grad_fn that warns, when an input requires grad.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"chord::{_name}", _fake, lib=_LIBRARY)
