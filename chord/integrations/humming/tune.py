"""What vLLM asks before it serves: here the block size of its plans, and the moment to load every kernel."""

from __future__ import annotations

from typing import Any

import torch

from chord.integrations import moe
from chord.integrations.humming.config import GemmType, LayerConfig
from chord.integrations.humming.refusals import refuse
from chord.w4a16.launch import CONTIGUOUS, MASKED, OPERATOR

OPERATORS = {
    GemmType.INDEXED: OPERATOR,
    GemmType.GROUPED_CONTIGUOUS: CONTIGUOUS,
    GemmType.GROUPED_MASKED: MASKED,
}
MOST_ROWS = 1 << 30
ROW_OPERATORS = ("moe_swiglu", "moe_scatter")
"""What `may_process_input` launches; vLLM makes its plans and combines by itself."""


def get_heuristics_config(
    *, layer_config: LayerConfig, use_f16_accum: bool, use_batch_invariant: bool, gemm_type: GemmType | str
) -> list[list[Any]]:
    """One interval of row counts with one block size, whatever the shape: the kernels choose their tiles themselves.

    Loads all kernels that the projection can need. Raises NotImplementedError for float16 accumulation and for dense
    layers, and chord's errors where a kernel cannot be loaded.
    """
    if use_f16_accum:
        refuse("VLLM_HUMMING_USE_F16_ACCUM=1")
    operator = OPERATORS.get(GemmType(gemm_type))
    if operator is None:
        refuse(f"the gemm type {GemmType(gemm_type).value}")
    if layer_config.device_index is not None:
        device = torch.device("cuda", layer_config.device_index)
        moe.preload(device, [layer_config.shape], (operator, *ROW_OPERATORS))
    return [[0, MOST_ROWS, {"block_shape": [moe.BLOCK_M, 256, 64]}]]
