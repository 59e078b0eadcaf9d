"""The torch custom ops chord::moe_w4a16_combine and chord::moe_w4a16_combine_out: kernels, the reference, fakes.

None is differentiable: results have no grad_fn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from chord.router.validate import MAX_EXPERTS, check_devices, check_int, check_memory, check_tensor
from chord.w4a16 import combine_launch, layout, reference
from chord.w4a16.api import BlockPlan
from chord.w4a16.layout import WeightShape
from chord.w4a16.rows import combine_rows
from chord.w4a16.validate import check_inputs

_INPUTS = (
    "Tensor x, Tensor packed, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded,"
    " Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, int num_experts, int block_m, SymInt expert_rows,"
    " bool invariant"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_LIBRARY = torch.library.Library("chord", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    f"moe_w4a16_combine({_INPUTS}) -> Tensor",
    f"moe_w4a16_combine_out({_INPUTS}, Tensor(a!) routed, Tensor(b!) out) -> ()",
):
    _LIBRARY.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]


class Arguments(NamedTuple):
    """What the ops take before the outputs, in the schema's order."""

    x: torch.Tensor
    packed: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    num_experts: int
    block_m: int
    expert_rows: int
    invariant: bool

    @property
    def plan(self) -> BlockPlan:
        return BlockPlan(self.sorted_token_ids, self.expert_ids, self.num_tokens_post_padded)


def check(given: Arguments) -> WeightShape:
    """Types, shapes and devices of everything that is read; returns the projection's shape. Works on fake tensors."""
    shape = check_inputs(given.x, given.packed, *given.plan, None, False, 1, given.block_m, given.expert_rows)
    check_tensor("topk_ids", given.topk_ids, (torch.int32,), (None, None))
    tokens, top_k = given.topk_ids.shape
    check_int("top_k (columns of topk_ids)", top_k, 1)
    check_int("num_experts", given.num_experts, 1, MAX_EXPERTS)
    check_tensor("x", given.x, (torch.bfloat16,), (tokens * top_k, shape.k))
    check_tensor("topk_weights", given.topk_weights, (torch.float32,), (tokens, top_k))
    tensors = {"x": given.x, "topk_ids": given.topk_ids, "topk_weights": given.topk_weights}
    if given.expert_map is not None:
        check_tensor("expert_map", given.expert_map, (torch.int32,), (given.num_experts,))
        tensors["expert_map"] = given.expert_map
    check_devices(tensors)
    return shape


def check_outputs(given: Arguments, shape: WeightShape, routed: torch.Tensor, out: torch.Tensor) -> None:
    """routed: bfloat16 [M * k, n], out: [M, n], beside x and apart from what is still read when they are written.

    Reads addresses. out may lie over x, as a framework's buffers do: it is written when x is no longer needed. Neither
    may lie over the plan, which another call with it needs.
    """
    tokens, top_k = given.topk_ids.shape
    check_tensor("routed", routed, (torch.bfloat16,), (tokens * top_k, shape.n))
    check_tensor("out", out, (torch.bfloat16,), (tokens, shape.n))
    check_devices({"x": given.x, "routed": routed, "out": out})
    inputs = {"packed": given.packed, "sorted_token_ids": given.sorted_token_ids}
    inputs |= {"topk_weights": given.topk_weights, "topk_ids": given.topk_ids}
    anywhere = {"expert_ids": given.expert_ids, "num_tokens_post_padded": given.num_tokens_post_padded}
    if given.expert_map is not None:
        anywhere["expert_map"] = given.expert_map
    check_memory(inputs, {"routed": routed, "out": out}, anywhere)
    check_memory({"x": given.x}, {"routed": routed})


def local_ids(given: Arguments) -> torch.Tensor:
    """[M, k] int64: which of the experts of `packed` each route goes to, -1 for one elsewhere."""
    ids, experts = given.topk_ids.long(), given.num_experts
    found = ids if given.expert_map is None else given.expert_map[ids.clamp(0, experts - 1)].long()
    return torch.where((ids >= 0) & (ids < experts) & (found >= 0), found, -1)


def run(given: Arguments, shape: WeightShape, routed: torch.Tensor, out: torch.Tensor) -> None:
    """Writes `out` from checked arguments: kernels for CUDA tensors, the reference for CPU tensors."""
    if given.x.is_cuda:
        if given.expert_ids.numel() and given.topk_ids.numel():
            combine_launch.combine(given, shape, routed, out)
        else:  # a plan without room for blocks names nothing
            out.detach().zero_()
        return
    pairs = given.topk_ids.numel()
    rows = reference.block_rows(*given.plan, block_m=given.block_m, num_experts=shape.experts, num_pairs=pairs)
    words, scales = layout.unpack(given.packed, shape)
    with torch.no_grad():  # a kernel records nothing either
        reference.moe_w4a16(given.x, words, scales, rows, top_k=1, out=routed)
        experts, here = given.num_experts, given.expert_map
        combine_rows(routed, out, given.topk_weights, given.topk_ids, num_experts=experts, expert_map=here)


def _new(*arguments: Any) -> torch.Tensor:  # noqa: ANN401 - as the schema says
    given = Arguments(*arguments)
    shape = check(given)
    tokens, top_k = given.topk_ids.shape
    routed, out = given.x.new_empty(tokens * top_k, shape.n), given.x.new_empty(tokens, shape.n)
    check_outputs(given, shape, routed, out)
    run(given, shape, routed, out)
    return out


def _out(*arguments: Any) -> None:  # noqa: ANN401
    *inputs, routed, out = arguments
    given = Arguments(*inputs)
    shape = check(given)
    check_outputs(given, shape, routed, out)
    run(given, shape, routed, out)


def _new_fake(*arguments: Any) -> torch.Tensor:  # noqa: ANN401
    given = Arguments(*arguments)
    return given.x.new_empty(given.topk_ids.shape[0], check(given).n)


def _out_fake(*arguments: Any) -> None:  # noqa: ANN401
    *inputs, routed, out = arguments
    given = Arguments(*inputs)
    shape = check(given)
    tokens, top_k = given.topk_ids.shape
    check_tensor("routed", routed, (torch.bfloat16,), (tokens * top_k, shape.n))
    check_tensor("out", out, (torch.bfloat16,), (tokens, shape.n))


for _name, _real, _fake in (
    ("moe_w4a16_combine", _new, _new_fake),
    ("moe_w4a16_combine_out", _out, _out_fake),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _real, _key)  # type: ignore[no-untyped-call]
    # Without this torch gives results a grad_fn that warns, when an input requires grad.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"chord::{_name}", _fake, lib=_LIBRARY)
