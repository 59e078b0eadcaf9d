"""From checked CUDA tensors to the two launches of moe_w4a16_combine: the GEMM, and the sums behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chord._runtime import Prepared
from chord.w4a16 import launch
from chord.w4a16.layout import WeightShape

if TYPE_CHECKING:
    from chord.w4a16.combine_ops import Arguments

UNIT_COLUMNS = 1024


def combine(given: Arguments, shape: WeightShape, routed: torch.Tensor, out: torch.Tensor) -> None:
    """Launches both on torch's current stream of the tensors' device. The sums must follow the GEMM: they read the
    routes before they wait for the kernel in front, which therefore must not be the one that writes those.
    """
    values, sums = _gemm_values(given, shape, routed), _sum_values(given, routed, out)
    launch.launch_with_sums(values, sums, given.x.device.index, shape, given.expert_rows, given.invariant)


def prepare(
    given: Arguments, shape: WeightShape, routed: torch.Tensor, out: torch.Tensor, program: str | None
) -> Prepared:
    """Binds what `combine` would launch to checked buffers; follows torch's current stream. Named after the GEMM."""
    values, sums = _gemm_values(given, shape, routed), _sum_values(given, routed, out)
    device, owners = given.x.device.index, (given, routed, out)
    return launch.prepare(
        launch.OPERATOR, values, device, shape, given.expert_rows, given.invariant, program, owners, sums
    )


def _gemm_values(given: Arguments, shape: WeightShape, routed: torch.Tensor) -> dict[str, int]:
    return launch.gemm_values(given.x, given.packed, given.plan, None, routed, shape, top_k=1, block_m=given.block_m)


def _sum_values(given: Arguments, routed: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    """Every argument of the moe_w4a16_combine contract by name; pointers as ints."""
    (tokens, top_k), width = given.topk_ids.shape, out.shape[1]
    return {
        "rows": routed.data_ptr(),
        "out": out.data_ptr(),
        "topk_ids": given.topk_ids.data_ptr(),
        "expert_map": 0 if given.expert_map is None else given.expert_map.data_ptr(),
        "weights": given.topk_weights.data_ptr(),
        "num_tokens": tokens,
        "top_k": top_k,
        "num_experts": given.num_experts,
        "width": width,
        "num_units": tokens * -(-width // UNIT_COLUMNS),
    }
