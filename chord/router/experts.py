"""Local experts of an expert-parallel rank: from a range or a map to the int32 map that the kernels read."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils.weak import WeakIdKeyDictionary

from chord.router.validate import check_int, check_tensor

_known_counts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # map tensor -> (version counter, number of local experts)


def expert_map_of(local: range, num_experts: int, device: torch.device) -> torch.Tensor:
    """[num_experts] int32: position of each expert in `local`, or -1. Made on the device: legal inside a graph
    capture.
    """
    ids = torch.arange(num_experts, dtype=torch.int32, device=device)
    position = torch.div(ids - local.start, local.step, rounding_mode="floor")
    member = (position >= 0) & (position < len(local)) & (position * local.step + local.start == ids)
    return torch.where(member, position, torch.full_like(position, -1))


@lru_cache(maxsize=256)
def _cached_map(local: range, num_experts: int, device: torch.device) -> torch.Tensor:
    expert_map = expert_map_of(local, num_experts, device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once per range: other streams may read the cached map
    return expert_map


def resolve_local_experts(
    local_experts: range | torch.Tensor | None,
    num_experts: int,
    device: torch.device,
    num_local_experts: int | None = None,
) -> tuple[torch.Tensor | None, int]:
    """(expert map or None, number of local experts).

    A map does not say on the host how many local experts it has: `num_local_experts`, or the caller's plan, tells.
    Without either the map is read back once (a synchronisation) and the answer is remembered until the map is written
    to; maps made under torch.inference_mode do not tell when that happens and are read back each time.
    Raises TypeError for anything else, ValueError for an empty range, ids outside 0..num_experts-1, or a count that
    contradicts the range.
    """
    if num_local_experts is not None:
        check_int("num_local_experts", num_local_experts, 0)
    if local_experts is None:
        if num_local_experts not in (None, num_experts):
            raise ValueError(
                f"num_local_experts: expected {num_experts} (all) without local_experts, got {num_local_experts}"
            )
        return None, num_experts
    if isinstance(local_experts, torch.Tensor):
        check_tensor("local_experts", local_experts, (torch.int32,), (num_experts,))
        if num_local_experts is None:
            return local_experts, _count_local(local_experts)
        check_int("num_local_experts", num_local_experts, 1, num_experts)
        return local_experts, num_local_experts
    if not isinstance(local_experts, range):
        raise TypeError(f"local_experts: expected a range or an int32 tensor, got {type(local_experts).__name__}")
    return _range_map(local_experts, num_experts, device, num_local_experts), len(local_experts)


def _range_map(local: range, num_experts: int, device: torch.device, num_local_experts: int | None) -> torch.Tensor:
    if len(local) == 0 or min(local[0], local[-1]) < 0 or max(local[0], local[-1]) >= num_experts:
        raise ValueError(f"local_experts: expected a non-empty range within 0..{num_experts - 1}, got {local}")
    if num_local_experts not in (None, len(local)):
        raise ValueError(f"num_local_experts: expected {len(local)}, the length of {local}, got {num_local_experts}")
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return expert_map_of(local, num_experts, device)  # belongs to the graph: must not outlive it in a cache
    return _cached_map(local, num_experts, device)


def _count_local(expert_map: torch.Tensor) -> int:
    if torch.compiler.is_compiling():
        raise ValueError("local_experts: a map needs num_local_experts (or a plan) when it is traced by torch.compile")
    version = None if expert_map.is_inference() else expert_map._version
    known = _known_counts.get(expert_map)  # type: ignore[no-untyped-call]
    if known is not None and version is not None and known[0] == version:
        return int(known[1])
    if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "local_experts: the number of local experts of this map is not known yet, and reading it would spoil the"
            " CUDA graph capture; pass num_local_experts (or a plan)"
        )
    count = int(expert_map.max()) + 1
    check_int("num_local_experts (largest entry of local_experts + 1)", count, 1, expert_map.numel())
    _known_counts[expert_map] = (version, count)
    return count
