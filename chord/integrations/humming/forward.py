"""The calls of a forward pass: moving and activating rows, and the GEMMs. Legal inside CUDA graphs."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from chord.integrations.humming.config import GemmType, LayerConfig
from chord.integrations.humming.refusals import refuse
from chord.integrations.moe import BLOCK_M
from chord.w4a16 import PackedW4A16, moe_w4a16, moe_w4a16_contiguous, moe_w4a16_masked
from chord.w4a16.rows import scatter_rows, swiglu_rows

SWIGLU = ("binary_split", "(a / (1.f + expf(-a))) * b")
"""Kind and formula of the activation that is served, as vLLM writes them."""

Processed = tuple[torch.Tensor, None, None]


def may_process_input(
    config: LayerConfig,
    inputs: torch.Tensor,
    *,
    outputs: torch.Tensor | None = None,
    token_scales: torch.Tensor | None = None,
    activation_type: str = "none",
    activation_impl: str | None = None,
    hadamard_block_size: int | None = None,
    layout: str = "normal",
    expert_tokens: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
    num_valid_tokens: torch.Tensor | None = None,
) -> Processed:
    """(rows for the next GEMM, no scales).

    Without an activation: the rows themselves, or with layout "scatter" copies in `outputs` at scatter_idx [M, k].
    With SwiGLU: silu(first half) * second half in `outputs`, of the rows that exist: those below num_valid_tokens, with
    "grouped_mask" the first expert_tokens[e] of each slab, with "scatter" those whose scatter_idx is not negative.
    Raises NotImplementedError for another activation, quantised or rotated activations.
    """
    if (hadamard_block_size or 0) > 1 or token_scales is not None:
        refuse("quantised or rotated activations")
    rows = inputs.reshape(-1, inputs.shape[-1])
    if activation_type == "none":
        if outputs is None or (layout != "scatter" and num_valid_tokens is None):
            return inputs, None, None
        if scatter_idx is None:
            return inputs, None, None
        scatter_rows(rows, outputs, scatter_idx.view(rows.shape[0], -1), limit=num_valid_tokens)
        return outputs, None, None
    if (activation_type, activation_impl) != SWIGLU:
        refuse(f"the activation {activation_impl!r} ({activation_type})")
    if outputs is None:
        raise ValueError("outputs: expected a tensor for the activated rows, got none")
    swiglu_rows(
        rows,
        outputs.view(rows.shape[0], -1),
        row_ids=None if scatter_idx is None else scatter_idx.view(-1),
        limit=num_valid_tokens,
        counts=expert_tokens,
    )
    return outputs, None, None


def humming_forward(
    config: LayerConfig,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    *,
    outputs: torch.Tensor,
    compute_config: str,
    valid_shape_m: int,
    sorted_ids: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    num_tokens_padded: torch.Tensor | None = None,
    top_k: int = 1,
    expert_layout: torch.Tensor | None = None,
    tuning_config: str | None = None,
    locks: torch.Tensor | None = None,
    **absent: torch.Tensor | None,
) -> torch.Tensor:
    """One projection of the rows that sorted_ids or expert_layout name, written to `outputs`.

    valid_shape_m: about how many rows there are on this rank; it only chooses among kernels. expert_layout: prefix sums
    [E + 1] (contiguous) or counts [E] (masked). Raises NotImplementedError for scales, zero points, biases and
    dense layers.
    """
    for name, tensor in absent.items():
        if tensor is not None:
            refuse(f"{name} of a forward call")
    kind, invariant = _parsed(compute_config)
    packed = PackedW4A16(weight, config.shape)
    options: dict[str, Any] = {
        "expected_rows": -(-valid_shape_m // config.num_experts),
        "invariant": invariant,
    }
    if kind == GemmType.INDEXED:
        plan = (sorted_ids, expert_ids, num_tokens_padded)
        rows = outputs.view(-1, config.shape_n)
        moe_w4a16(inputs.contiguous(), packed, plan, top_k=top_k, block_m=BLOCK_M, out=rows, **options)  # type: ignore[arg-type]
    elif kind == GemmType.GROUPED_CONTIGUOUS:
        rows = outputs.view(-1, config.shape_n)
        moe_w4a16_contiguous(inputs.contiguous(), packed, offsets=expert_layout, out=rows, **options)
    elif kind == GemmType.GROUPED_MASKED:
        slabs = inputs.contiguous().view(config.num_experts, -1, config.shape_k)
        rows = outputs.view(config.num_experts, -1, config.shape_n)
        moe_w4a16_masked(slabs, packed, expert_layout, out=rows, **options)  # type: ignore[arg-type]
    else:
        refuse(f"the gemm type {kind.value}")
    return outputs


def may_quant_input(*_: object, **__: object) -> None:
    """Only vLLM's linear layers call it."""
    refuse("a linear layer")


@lru_cache(maxsize=64)
def _parsed(compute_config: str) -> tuple[GemmType, bool]:
    """(gemm type, batch invariance) of vLLM's JSON text, which is the same string in every call of a layer."""
    settings = json.loads(compute_config)
    if settings.get("use_f16_accum"):
        refuse("VLLM_HUMMING_USE_F16_ACCUM=1")
    return GemmType(settings["gemm_type"]), bool(settings.get("use_batch_invariant"))
