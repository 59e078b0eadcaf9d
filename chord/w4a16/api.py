"""The W4A16 MoE GEMM as users call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from chord._runtime import Prepared
from chord.router.plan import RoutePlan
from chord.router.validate import check_block_m, check_int, check_tensor
from chord.w4a16 import launch, ops
from chord.w4a16.validate import (
    MAX_PAIRS,
    check_buffers,
    check_inputs,
    check_kinds,
    check_output,
    check_plan_values,
)
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


Plan = RoutePlan | BlockPlan | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def moe_w4a16(
    x: torch.Tensor,
    packed: PackedW4A16,
    plan: Plan,
    *,
    top_k: int,
    block_m: int,
    row_weight: torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    swiglu: bool = False,
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
    swiglu: of weights packed with gated=True; out[pair] = row_weight[pair] * silu(gate) * up, [M * top_k, N / 2], in
        float32 up to the one rounding.
    zero_missing: clear the output first. Otherwise rows of pairs that the plan does not name keep what they held, in
        a new output whatever its memory held.
    validate: check the plan's values, which reads them back, and raise ValueError. Without it nothing is read back,
        and a wrong plan gives wrong results but no access outside the buffers.

    Works in CUDA graphs and torch.compile (without validate). CPU tensors run the plain reference. Not differentiable:
    the result has no grad_fn, even if x or row_weight require grad. Raises TypeError or ValueError before any launch
    for arguments outside this description.
    """
    expected_rows = _checked_rows(x, packed, top_k, block_m, expected_rows)
    blocks = blocks_of(plan)
    flags = {"invariant": invariant, "zero_missing": zero_missing, "swiglu": swiglu, "validate": validate}
    check_kinds(blocks._asdict(), {"row_weight": row_weight, "out": out}, flags, expected_rows)
    shape = packed.shape
    if validate:
        pairs = x.shape[0] * top_k
        check_plan_values(*blocks, block_m=block_m, num_experts=shape.experts, num_pairs=pairs)
    arguments = (
        x, packed.data, *blocks, row_weight, shape.gated, top_k, block_m, expected_rows,
        invariant, zero_missing, swiglu,
    )  # fmt: skip
    if out is None:
        result: torch.Tensor = torch.ops.chord.moe_w4a16.default(*arguments)
        return result
    torch.ops.chord.moe_w4a16_out.default(*arguments, out)
    return out


class PreparedMoeW4A16:
    """A W4A16 GEMM bound to its buffers: calling it launches the kernels again on torch's current stream.

    A call reads x, the plan and row_weight as they are then and writes `out`; it allocates nothing and synchronises
    nothing. Made by `chord.prepare_moe_w4a16`. One instance must not run on two streams at once: both runs would write
    the same output.
    """

    __slots__ = ("launch", "out", "program")

    def __init__(self, prepared: Prepared, out: torch.Tensor) -> None:
        self.launch = prepared.launch
        """The bare launch, which keeps the buffers alive by itself; calling it skips one Python frame."""
        self.program = prepared.program
        """Name of the program that runs; "reference" on a CPU, "" where there is nothing to do."""
        self.out = out

    def __call__(self) -> None:
        self.launch()


def prepare_moe_w4a16(
    x: torch.Tensor,
    packed: PackedW4A16,
    plan: Plan,
    *,
    top_k: int,
    block_m: int,
    row_weight: torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    program: str | None = None,
) -> PreparedMoeW4A16:
    """Checks, looks up, verifies and loads once; the result launches on the same buffers as often as it is called.

    Arguments as for `chord.moe_w4a16`. zero_missing adds a launch that clears the output. `program` names a program to
    run instead of the routed one (for measurements).
    """
    expected_rows = _checked_rows(x, packed, top_k, block_m, expected_rows)
    blocks, data = blocks_of(plan), packed.data
    flags = {"invariant": invariant, "zero_missing": zero_missing, "swiglu": swiglu}
    check_kinds(blocks._asdict(), {"row_weight": row_weight, "out": out}, flags, expected_rows)
    shape = check_inputs(x, data, *blocks, row_weight, packed.shape.gated, top_k, block_m, expected_rows, swiglu)
    if out is None:
        out = torch.empty(x.shape[0] * top_k, shape.outputs(swiglu), dtype=torch.bfloat16, device=x.device)
    check_output(out, x, shape, top_k, swiglu)
    check_buffers(x, data, *blocks, row_weight, out)
    if not x.is_cuda:
        check_no_program(program)
        tensors = (x, data, *blocks, row_weight, out)
        scalars = (shape, top_k, block_m, expected_rows, invariant, zero_missing, swiglu)
        return PreparedMoeW4A16(Prepared(lambda: ops.run(*tensors, *scalars), "reference"), out)
    if x.shape[0] and blocks.expert_ids.numel():
        prepared = launch.prepare_gemm(
            x, data, blocks, row_weight, out, shape,
            top_k=top_k, block_m=block_m, expert_rows=expected_rows, invariant=invariant, swiglu=swiglu,
            program=program,
        )  # fmt: skip
    else:
        prepared = Prepared(lambda: None, "")
    if zero_missing:
        prepared = prepared._replace(launch=ClearedFirst(out, prepared.launch))
    return PreparedMoeW4A16(prepared, out)


class ClearedFirst:
    """A launch that zeroes its output before."""

    __slots__ = ("launched", "rows")

    def __init__(self, out: torch.Tensor, launched: Callable[[], object]) -> None:
        self.rows = out.detach()
        self.launched = launched

    def __call__(self) -> None:
        self.rows.zero_()
        self.launched()


def check_no_program(program: str | None) -> None:
    """Raises ValueError for a program named for CPU tensors."""
    if program is not None:
        raise ValueError(f"program: expected None for CPU tensors, which run the reference, got {program!r}")


def checked_packed(packed: object) -> PackedW4A16:
    """Raises TypeError for anything but a PackedW4A16: packed bytes alone do not say whether they are gated."""
    if not isinstance(packed, PackedW4A16):
        raise TypeError(f"packed: expected a chord.PackedW4A16 (see chord.pack_w4a16), got {type(packed).__name__}")
    return packed


def check_width(x: torch.Tensor, packed: PackedW4A16) -> None:
    """Raises ValueError unless rows of x are as long as those of the weights: bytes alone would fit other shapes."""
    if x.shape[-1] != packed.shape.k:
        raise ValueError(f"x: expected rows of {packed.shape.k} values, as packed has them, got {x.shape[-1]}")


def blocks_of(plan: object) -> BlockPlan:
    """Raises TypeError unless a plan's first three members may be what a GEMM reads of it."""
    if not isinstance(plan, (tuple, list)) or len(plan) < len(BlockPlan._fields):
        raise TypeError(
            "plan: expected a chord.RoutePlan, a BlockPlan or a tuple of sorted_token_ids, expert_ids and "
            f"num_tokens_post_padded, got {plan!r:.80} ({type(plan).__name__})"
        )
    return BlockPlan(*plan[: len(BlockPlan._fields)])


def _checked_rows(x: object, packed: object, top_k: int, block_m: int, expected_rows: int | None) -> int:
    """expected_rows, worked out where it is not given, after checks of what that needs."""
    weights = checked_packed(packed)
    check_tensor("x", x, (torch.bfloat16,), (None, None))
    assert isinstance(x, torch.Tensor)  # noqa: S101 - check_tensor said so
    check_width(x, weights)
    check_int("top_k", top_k, 1, MAX_PAIRS)  # here, as the op's schema would take True for 1
    check_block_m(block_m)
    return -(-x.shape[0] * top_k // weights.shape.experts) if expected_rows is None else expected_rows
