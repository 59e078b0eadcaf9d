"""The route plan: which (token, route) pairs each expert gets, in whole blocks of block_m rows.

A pair is numbered `token * top_k + route`, where route is the position of the expert among the token's selected ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoutePlan(NamedTuple):
    """Six int32 tensors on one device. L is the number of (local) experts, P the number of pairs.

    Entries of `sorted_token_ids` at and beyond `num_tokens_post_padded`, and of `expert_ids` at and beyond
    `num_tokens_post_padded / block_m`, are never written: they keep whatever the buffer held before.
    """

    sorted_token_ids: torch.Tensor
    """[>= blocks * block_m]: pairs by expert, ascending inside an expert, each expert filled up with P to whole
    blocks.
    """
    expert_ids: torch.Tensor
    """[>= blocks]: the expert of each block of block_m entries of sorted_token_ids."""
    num_tokens_post_padded: torch.Tensor
    """[1]: the valid extent of sorted_token_ids, a multiple of block_m."""
    expert_counts: torch.Tensor
    """[L]: pairs per expert, without padding."""
    expert_offsets: torch.Tensor
    """[L + 1]: where each expert starts in sorted_token_ids; the last entry is the valid extent."""
    expert_scatter_offsets: torch.Tensor
    """[L]: equals expert_counts (a scatter cursor after its last step)."""


def max_route_blocks(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> int:
    """The most blocks that a plan can need: what `expert_ids` must hold; `sorted_token_ids`: block_m times as much.

    The worst case spreads pairs over as many experts as possible, one block each; further pairs then fill whole blocks.
    With local experts, `num_experts` is their number. Accepts symbolic token counts (torch.compile).
    Raises ValueError for more than 2^24 pairs, top_k or num_experts outside 1 to 1024, or a block_m outside 8, 16, ...,
    256; TypeError for what is no int.
    """
    _check_sizes(num_tokens, top_k, num_experts, block_m)
    return most_blocks(num_tokens, top_k, num_experts, block_m)


def most_blocks(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> int:
    """`max_route_blocks` of arguments that are taken as valid."""
    pairs = num_tokens * top_k
    spread = torch.sym_min(pairs, num_experts) if isinstance(pairs, torch.SymInt) else min(pairs, num_experts)
    blocks: int = spread + (pairs - spread) // block_m
    return blocks


def empty_route_plan(num_tokens: int, top_k: int, num_experts: int, block_m: int, device: torch.device) -> RoutePlan:
    """An uninitialised plan of exactly the worst-case capacity. Arguments are taken as valid."""
    blocks = most_blocks(num_tokens, top_k, num_experts, block_m)
    empty = torch.empty
    int32 = torch.int32
    return RoutePlan(
        empty(blocks * block_m, dtype=int32, device=device),
        empty(blocks, dtype=int32, device=device),
        empty(1, dtype=int32, device=device),
        empty(num_experts, dtype=int32, device=device),
        empty(num_experts + 1, dtype=int32, device=device),
        empty(num_experts, dtype=int32, device=device),
    )


def allocate_route_plan(
    num_tokens: int,
    *,
    top_k: int,
    num_experts: int,
    block_m: int,
    device: torch.device | str = "cuda",
) -> RoutePlan:
    """Allocates an uninitialised plan large enough for any routing of num_tokens rows.

    num_experts: experts that the plan ranges over; with `local_experts`, the number of local ones.
    Raises TypeError and ValueError as `max_route_blocks`, and for what names no device.
    """
    _check_sizes(num_tokens, top_k, num_experts, block_m)
    return empty_route_plan(num_tokens, top_k, num_experts, block_m, device_of(device))


def _check_sizes(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> None:
    from chord.router.validate import MAX_EXPERTS, MAX_PAIRS, check_block_m, check_int

    check_int("num_tokens", num_tokens, 0, MAX_PAIRS)
    check_int("top_k", top_k, 1, MAX_EXPERTS)
    check_int("num_tokens * top_k", num_tokens * top_k, 0, MAX_PAIRS)
    check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    check_block_m(block_m)


def device_of(device: object) -> torch.device:
    """The device of an argument. Raises TypeError or ValueError for what names none."""
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device: expected a torch.device or its name, got {device!r} ({type(device).__name__})")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a torch.device or its name, such as 'cuda:0', got {device!r}") from error
