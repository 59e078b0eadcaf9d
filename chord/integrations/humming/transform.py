"""From a checkpoint's tensors to packed weights and their settings, once, when a layer is loaded."""

from __future__ import annotations

import torch

from chord.integrations import slabs
from chord.integrations.humming.config import LayerConfig
from chord.integrations.humming.dtypes import DataType
from chord.integrations.humming.refusals import refuse
from chord.integrations.humming.schema import HummingInputSchema, HummingWeightSchema, Tensors


def prepare_and_transform_humming_tensors(
    *,
    tensors: Tensors,
    shape_n: int,
    shape_k: int,
    input_schema: HummingInputSchema,
    weight_schema: HummingWeightSchema,
    has_bias: bool,
    num_experts: int | None,
    torch_dtype: torch.dtype,
    device: torch.device,
    pad_n_to_multiple: int = 1,
    pad_k_to_multiple: int = 1,
) -> tuple[LayerConfig, Tensors]:
    """(settings, {"weight": uint8 [E, bytes]}) of one projection; the scales lie among the packed bytes.

    tensors: weight int32 [E, N, K / 8] and weight_scale bfloat16 [E, N, K / 32]. The wishes for padding are not
    needed. Raises NotImplementedError for anything that is not served.
    """
    if num_experts is None:
        refuse("a linear layer")
    if has_bias:
        refuse("experts with biases")
    if torch_dtype != torch.bfloat16:
        refuse(f"parameters of {torch_dtype} (--dtype bfloat16 is)")
    try:
        packed = slabs.pack_tensors(tensors["weight"], tensors["weight_scale"])
    except ValueError as error:
        refuse(f"a projection of {num_experts} experts, {shape_n} x {shape_k}: {error}; such a shape")
    if (packed.shape.experts, packed.shape.n, packed.shape.k) != (num_experts, shape_n, shape_k):
        raise ValueError(
            f"weight: expected {num_experts} experts of {shape_n} x {shape_k}, got {packed.shape.experts} of "
            f"{packed.shape.n} x {packed.shape.k}"
        )
    bf16 = DataType("bfloat16")
    config = LayerConfig(num_experts, shape_n, shape_k, packed.device.index, bf16, bf16)
    return config, {"weight": packed.data}
