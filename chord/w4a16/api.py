"""The W4A16 MoE GEMM as users call it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from chord.router.plan import RoutePlan
from chord.router.validate import check_block_m, check_int, check_tensor
from chord.w4a16 import ops  # noqa: F401 - registers the ops
from chord.w4a16.validate import check_plan_values
from chord.w4a16.weights import PackedW4A16


class BlockPlan(NamedTuple):
    """The part of a route plan that the indexed operator reads; vLLM's moe_align_block_size returns these three.

    The first num_tokens_post_padded entries of sorted_token_ids form blocks of block_m; block b belongs to expert
    expert_ids[b]. Pairs are token * top_k + route, each at most once, before a block's empty places (any id of at least
    M * top_k). An expert of -1 makes a block count for nothing. Buffers may be larger than the plan needs.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor


def moe_w4a16(
    x: torch.Tensor,
    packed: PackedW4A16,
    plan: RoutePlan | BlockPlan | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    top_k: int,
    block_m: int,
    row_weight: torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """out[pair] = row_weight[pair] * (weights[expert of pair] @ x[pair // top_k]), [M * top_k, N] bfloat16.

    x: [M, K] bfloat16. gate_up takes M tokens and the router's top_k; down takes M * top_k rows and top_k = 1.
    packed: from `chord.pack_w4a16`. plan: of `chord.fused_router`, `chord.route_plan`, or the like.
    block_m: the plan's, a multiple of 8 up to 256. 8 is best: the kernels join blocks of one expert themselves.
    row_weight: [M * top_k] float32, multiplied in float32 before the one rounding of the result.
    expected_rows: rows that an expert has on average, if the host knows better than M * top_k / E. It only chooses
        among programs: a wrong value costs time, never correctness.
    invariant: one main loop for all batch sizes, so that a row's bits depend on the row and its expert alone.
    zero_missing: clear the output first. Otherwise rows of pairs that the plan does not name keep what they held, in
        a new output whatever its memory held.
    validate: check the plan's values, which reads them back, and raise ValueError. Without it nothing is read back,
        and a wrong plan gives wrong results but no access outside the buffers.

    Works in CUDA graphs and torch.compile (without validate). CPU tensors run the plain reference. Raises TypeError or
    ValueError before any launch for arguments outside this description.
    """
    if not isinstance(packed, PackedW4A16):
        raise TypeError(f"packed: expected a chord.PackedW4A16 (see chord.pack_w4a16), got {type(packed).__name__}")
    check_tensor("x", x, (torch.bfloat16,), (None, None))
    check_int("top_k", top_k, 1)  # here, as the op's schema would take True for 1
    check_block_m(block_m)
    blocks = BlockPlan(*plan[:3])
    shape = packed.shape
    if expected_rows is None:
        expected_rows = -(-x.shape[0] * top_k // shape.experts)
    if validate:
        pairs = x.shape[0] * top_k
        check_plan_values(*blocks, block_m=block_m, num_experts=shape.experts, num_pairs=pairs)
    arguments = (
        x,
        packed.data,
        *blocks,
        row_weight,
        shape.gated,
        top_k,
        block_m,
        expected_rows,
        invariant,
        zero_missing,
    )
    if out is None:
        result: torch.Tensor = torch.ops.chord.moe_w4a16.default(*arguments)
        return result
    torch.ops.chord.moe_w4a16_out.default(*arguments, out)
    return out
