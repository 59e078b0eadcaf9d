"""Argument checks of the W4A16 operators: every error names the argument, what was expected and what was found.

Metadata checks work on fake tensors as well. `check_plan_values` reads the plan back, which synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chord.router.validate import (
    check_block_m,
    check_bool,
    check_dense,
    check_devices,
    check_int,
    check_memory,
    check_tensor,
)
from chord.w4a16.layout import BLOCK, BLOCK_BYTES, WeightShape

MAX_PAIRS = (1 << 31) - 1
"""Most pairs (rows * top_k): ids are int32."""
MAX_HINT = (1 << 63) - 1
"""Most expected_rows: torch's operators take 64 bits."""
MAX_ELEMENTS = (1 << 35) - 8
"""Of x, 64 GiB: the kernels keep where a row lies in units of 8 elements, in 32 bits."""


def shape_of(x: torch.Tensor, packed: torch.Tensor, gated: bool) -> WeightShape:
    """The projection that packed bytes [E, n * k * 9 / 16] hold for rows of k. Raises ValueError if they hold none."""
    check_tensor("x", x, (torch.bfloat16,), (None, None))
    check_tensor("packed", packed, (torch.uint8,), (None, None))
    k = x.shape[1]
    check_int("elements of x", x.shape[0] * k, 0, MAX_ELEMENTS)
    column = k // BLOCK * BLOCK_BYTES  # bytes of 64 outputs
    if k == 0 or k % BLOCK or packed.shape[1] == 0 or packed.shape[1] % column:
        raise ValueError(
            f"x, packed: expected rows of k (a multiple of {BLOCK}) and n * k * 9 / 16 bytes an expert, got k = {k} "
            f"and {packed.shape[1]} bytes"
        )
    return WeightShape(packed.shape[0], packed.shape[1] // column * BLOCK, k, gated)


def check_kinds(
    tensors: Mapping[str, object], optional: Mapping[str, object], flags: Mapping[str, object], expected_rows: object
) -> None:
    """What torch's dispatcher would refuse by errors of its own, or take for something else. Raises TypeError or
    ValueError.
    """
    for name, value in tensors.items():
        check_dense(name, value)
    for name, value in optional.items():
        if value is not None:
            check_dense(name, value)
    for name, value in flags.items():
        check_bool(name, value)
    check_int("expected_rows", expected_rows, 0)
    check_int("expected_rows", expected_rows, 0, MAX_HINT)


def check_swiglu(swiglu: object, gated: bool) -> None:
    """That swiglu is only asked of weights whose gate and up rows are interleaved."""
    check_bool("swiglu", swiglu)
    if swiglu and not gated:
        raise ValueError("swiglu: expected weights packed with gated=True, got a projection without gates")


def check_inputs(
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
    swiglu: bool = False,
) -> WeightShape:
    """Types, shapes and devices of everything that is read; returns the projection's shape."""
    shape = shape_of(x, packed, gated)
    check_swiglu(swiglu, gated)
    check_int("top_k", top_k, 1)
    check_int("rows * top_k", x.shape[0] * top_k, 0, MAX_PAIRS)
    check_block_m(block_m)
    check_int("expected_rows", expert_rows, 0)
    tensors = {"x": x, "packed": packed}
    for name, tensor in (("sorted_token_ids", sorted_token_ids), ("expert_ids", expert_ids)):
        check_tensor(name, tensor, (torch.int32,), (None,))
        check_int(f"{name} (entries)", tensor.shape[0], 0, MAX_PAIRS)  # the kernels count them in 32 bits
        tensors[name] = tensor
    name = "num_tokens_post_padded"
    tensors[name] = check_dense(name, num_tokens_post_padded)
    check_tensor(name, num_tokens_post_padded, (torch.int32,), () if num_tokens_post_padded.dim() == 0 else (1,))
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (torch.float32,), (x.shape[0] * top_k,))
        tensors["row_weight"] = row_weight
    check_devices(tensors)
    return shape


def check_output(out: torch.Tensor, x: torch.Tensor, shape: WeightShape, top_k: int, swiglu: bool = False) -> None:
    """out: bfloat16 [rows * top_k, n], or n / 2 with swiglu, beside x."""
    check_tensor("out", out, (torch.bfloat16,), (x.shape[0] * top_k, shape.outputs(swiglu)))
    check_devices({"x": x, "out": out})


def check_buffers(
    x: torch.Tensor,
    packed: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    row_weight: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Addresses that the kernels rely on: 16-byte boundaries, and an output that overlaps nothing that is read."""
    inputs = {"x": x, "packed": packed, "sorted_token_ids": sorted_token_ids}
    if row_weight is not None:
        inputs["row_weight"] = row_weight
    anywhere = {"expert_ids": expert_ids, "num_tokens_post_padded": num_tokens_post_padded}
    check_memory(inputs, {"out": out}, anywhere)


def check_plan_values(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    *,
    block_m: int,
    num_experts: int,
    num_pairs: int,
) -> None:
    """A plan that says what a plan can say. Reads it back. Raises ValueError that names the first entry at fault."""
    count = int(num_tokens_post_padded.reshape(-1)[0])
    if count < 0 or count > sorted_token_ids.numel() or count % block_m:
        raise ValueError(
            f"num_tokens_post_padded: expected a multiple of block_m = {block_m} from 0 to "
            f"{sorted_token_ids.numel()} (entries of sorted_token_ids), got {count}"
        )
    blocks = count // block_m
    if blocks > expert_ids.numel():
        raise ValueError(f"expert_ids: expected at least {blocks} entries for {count} ids, got {expert_ids.numel()}")
    experts, ids = expert_ids[:blocks].cpu(), sorted_token_ids[:count].cpu().view(blocks, block_m)
    refuse(
        "expert_ids", experts, (experts < -1) | (experts >= num_experts), f"-1 (no expert) or 0 to {num_experts - 1}"
    )
    ids = ids[experts >= 0]
    refuse("sorted_token_ids", ids, ids < 0, f"0 to {num_pairs - 1}, or at least {num_pairs} in an empty place")
    filled = ids < num_pairs
    late = filled[:, 1:] & ~filled[:, :-1]
    refuse("sorted_token_ids", ids[:, 1:], late, "a block's pairs before its empty places")
    pairs = ids[filled].sort().values
    refuse("sorted_token_ids", pairs[1:], pairs.diff() == 0, "each pair once")


def refuse(name: str, values: torch.Tensor, wrong: torch.Tensor, expected: str) -> None:
    """Raises ValueError with the first of the values that are wrong, if there is one."""
    if wrong.any():
        at = wrong.flatten().nonzero()[0, 0]
        raise ValueError(f"{name}: expected {expected}, got {int(values.flatten()[at])}")
