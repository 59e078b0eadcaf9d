"""The torch custom ops chord::moe_w4a16 and chord::moe_w4a16_out: kernels on CUDA, the reference on a CPU, fakes.

None is differentiable: results have no grad_fn, whatever the inputs require and wherever they are.
"""

from __future__ import annotations

import torch

from chord.w4a16 import launch, layout, reference
from chord.w4a16.layout import WeightShape
from chord.w4a16.validate import check_buffers, check_inputs, check_output

_INPUTS = (
    "Tensor x, Tensor packed, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded,"
    " Tensor? row_weight, bool gated, int top_k, int block_m, SymInt expert_rows, bool invariant, bool zero_missing,"
    " bool swiglu"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_LIBRARY = torch.library.Library("chord", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (f"moe_w4a16({_INPUTS}) -> Tensor", f"moe_w4a16_out({_INPUTS}, Tensor(a!) out) -> ()"):
    _LIBRARY.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]


def _new(
    x: torch.Tensor,
    packed: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    row_weight: torch.Tensor | None,
    gated: bool,
    top_k: int,
    block_m: int,
    expert_rows: int,
    invariant: bool,
    zero_missing: bool,
    swiglu: bool,
) -> torch.Tensor:
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    shape = check_inputs(x, packed, *plan, row_weight, gated, top_k, block_m, expert_rows, swiglu)
    out = torch.empty(x.shape[0] * top_k, shape.outputs(swiglu), dtype=torch.bfloat16, device=x.device)
    check_buffers(x, packed, *plan, row_weight, out)
    run(x, packed, *plan, row_weight, out, shape, top_k, block_m, expert_rows, invariant, zero_missing, swiglu)
    return out


def _out(
    x: torch.Tensor,
    packed: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    row_weight: torch.Tensor | None,
    gated: bool,
    top_k: int,
    block_m: int,
    expert_rows: int,
    invariant: bool,
    zero_missing: bool,
    swiglu: bool,
    out: torch.Tensor,
) -> None:
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    shape = check_inputs(x, packed, *plan, row_weight, gated, top_k, block_m, expert_rows, swiglu)
    check_output(out, x, shape, top_k, swiglu)
    check_buffers(x, packed, *plan, row_weight, out)
    run(x, packed, *plan, row_weight, out, shape, top_k, block_m, expert_rows, invariant, zero_missing, swiglu)


def run(
    x: torch.Tensor,
    packed: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    row_weight: torch.Tensor | None,
    out: torch.Tensor,
    shape: WeightShape,
    top_k: int,
    block_m: int,
    expert_rows: int,
    invariant: bool,
    zero_missing: bool,
    swiglu: bool,
) -> None:
    """Writes `out` from checked arguments: a kernel for CUDA tensors, the reference for CPU tensors."""
    if zero_missing:
        out.detach().zero_()
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    if not x.is_cuda:
        pairs = x.shape[0] * top_k
        rows = reference.block_rows(*plan, block_m=block_m, num_experts=shape.experts, num_pairs=pairs)
        words, scales = layout.unpack(packed, shape)
        with torch.no_grad():  # a kernel records nothing either
            reference.moe_w4a16(x, words, scales, rows, top_k=top_k, row_weight=row_weight, out=out, swiglu=swiglu)
    elif expert_ids.numel() and x.shape[0]:
        launch.gemm(
            x, packed, plan, row_weight, out, shape,
            top_k=top_k, block_m=block_m, expert_rows=expert_rows, invariant=invariant, swiglu=swiglu,
        )  # fmt: skip


def _new_fake(
    x: torch.Tensor,
    packed: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    row_weight: torch.Tensor | None,
    gated: bool,
    top_k: int,
    block_m: int,
    expert_rows: int,
    _invariant: bool,
    _zero_missing: bool,
    swiglu: bool,
) -> torch.Tensor:
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    shape = check_inputs(x, packed, *plan, row_weight, gated, top_k, block_m, expert_rows, swiglu)
    return torch.empty(x.shape[0] * top_k, shape.outputs(swiglu), dtype=torch.bfloat16, device=x.device)


def _out_fake(
    x: torch.Tensor,
    packed: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    row_weight: torch.Tensor | None,
    gated: bool,
    top_k: int,
    block_m: int,
    expert_rows: int,
    _invariant: bool,
    _zero_missing: bool,
    swiglu: bool,
    out: torch.Tensor,
) -> None:
    plan = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    shape = check_inputs(x, packed, *plan, row_weight, gated, top_k, block_m, expert_rows, swiglu)
    check_output(out, x, shape, top_k, swiglu)


for _name, _real, _fake in (("moe_w4a16", _new, _new_fake), ("moe_w4a16_out", _out, _out_fake)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _real, _key)  # type: ignore[no-untyped-call]
    # Without this torch gives results a grad_fn that warns, when an input requires grad.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"chord::{_name}", _fake, lib=_LIBRARY)
