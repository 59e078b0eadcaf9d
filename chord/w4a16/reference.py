"""Plain torch references of the W4A16 operators, on any device. Dull on purpose.

Two kinds of weights: the contract's, bfloat16((code - 8) * scale), rounded once; and exact ones in float64, which say
how much of an error is the contract's own rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from chord.w4a16.layout import CODES_PER_WORD, SCALE_GROUP, codes_from_words

_WEIGHTS_AT_ONCE = 1 << 24
"""Bounds what is held dequantised to 128 MiB of float64, or one expert's."""


def exact_weights(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int32 [..., N, K/8], bfloat16 [..., N, K/32] -> float64 [..., N, K]: (code - 8) * scale without any rounding."""
    values = codes_from_words(words).to(torch.float64) - 8
    return values * scales.to(torch.float64).repeat_interleave(SCALE_GROUP, dim=-1)


def contract_weights(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same as bfloat16, rounded once: what the kernels multiply by."""
    values = codes_from_words(words).to(torch.float32) - 8  # exact, as is the product in float32: 4 + 8 bits
    return (values * scales.to(torch.float32).repeat_interleave(SCALE_GROUP, dim=-1)).to(torch.bfloat16)


def block_rows(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    *,
    block_m: int,
    num_experts: int,
    num_pairs: int,
) -> dict[int, torch.Tensor]:
    """The pairs of each expert that a plan names, in plan order: int64 tensors by expert.

    Blocks of an expert outside [0, num_experts) and ids outside [0, num_pairs) count for nothing, wherever they stand.
    """
    blocks = min(-(-max(int(num_tokens_post_padded.reshape(-1)[0]), 0) // block_m), expert_ids.numel())
    found: dict[int, list[torch.Tensor]] = {}
    for block, expert in enumerate(expert_ids[:blocks].tolist()):
        ids = sorted_token_ids[block * block_m : (block + 1) * block_m].to(torch.int64)
        ids = ids[(ids >= 0) & (ids < num_pairs)]
        if 0 <= expert < num_experts and ids.numel():
            found.setdefault(expert, []).append(ids)
    return {expert: torch.cat(parts) for expert, parts in sorted(found.items())}


def rows_by_expert(owners: torch.Tensor) -> dict[int, torch.Tensor]:
    """Positions of each expert's entries in [rows] owners, ascending: int64 by expert. Negative owners are nobody.

    Reads back once or twice, not once an expert.
    """
    experts, counts = owners.unique(return_counts=True)  # type: ignore[no-untyped-call]
    parts = owners.argsort(stable=True).split(counts.tolist())  # type: ignore[no-untyped-call]
    return {expert: part for expert, part in zip(experts.tolist(), parts, strict=True) if expert >= 0}


def expert_weights(
    words: torch.Tensor, scales: torch.Tensor, experts: Iterable[int], *, exact: bool = False
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each expert with its weights [N, K], the contract's or exact ones; small ones are worked out several at once."""
    dequantize = exact_weights if exact else contract_weights
    chosen, size = list(experts), max(1, _WEIGHTS_AT_ONCE // max(1, CODES_PER_WORD * words[:1].numel()))
    for start in range(0, len(chosen), size):
        some = chosen[start : start + size]
        stacked = [torch.stack([tensor[expert] for expert in some]) for tensor in (words, scales)]
        yield from zip(some, dequantize(*stacked), strict=True)


def moe_w4a16(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    rows: dict[int, torch.Tensor],
    *,
    top_k: int,
    row_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    exact: bool = False,
    swiglu: bool = False,
) -> torch.Tensor:
    """out[pair] = row_weight[pair] * (weights[expert] @ x[pair // top_k]) for the pairs of each expert.

    swiglu: the weights' first N / 2 rows are gates, and a row of the result is silu(gate) * up instead, N / 2 wide.

    x: [M, K] bfloat16; words, scales: a checkpoint (layout.py); rows: block_rows; row_weight: [M * top_k] float32.
    out: [M * top_k, N or N / 2], changed in place where a pair is named; zeros when not given. Contract weights,
    float32 sums, a bfloat16 result; with `exact`, exact weights, float64 sums and a float64 result.
    """
    kind = torch.float64 if exact else torch.float32
    if out is None:
        size = (x.shape[0] * top_k, words.shape[1] // 2 if swiglu else words.shape[1])
        out = torch.zeros(size, dtype=kind if exact else torch.bfloat16, device=x.device)
    for expert, weight in expert_weights(words, scales, rows, exact=exact):
        pairs = rows[expert]
        product = x[pairs // top_k].to(kind) @ weight.to(kind).T
        if swiglu:
            gate, up = product.chunk(2, dim=1)
            product = torch.nn.functional.silu(gate) * up
        if row_weight is not None:
            product *= row_weight[pairs, None].to(kind)
        out[pairs] = product.to(out.dtype)
    return out


def rms_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of result - exact over that of exact; NaN when either holds one."""
    difference = result.to(torch.float64) - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())
