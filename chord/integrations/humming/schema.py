"""What a checkpoint says of weights and activations, and the one scheme that is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from chord.integrations.humming.config import InputQuantizationMode
from chord.integrations.humming.dtypes import DataType
from chord.integrations.humming.refusals import refuse, unserved

Tensors = dict[str, torch.Tensor]

_SERVED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "type": "int",
    "num_bits": 4,
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}
_LOADED = ("weight_packed", "weight_scale")
_IGNORED = ("weight_shape",)
_UINT4, _BFLOAT16 = DataType("uint4"), DataType("bfloat16")


@dataclass(frozen=True)
class BaseWeightSchema:
    """Weights as a checkpoint has them, or as kernels take them."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseWeightSchema:
        """Raises NotImplementedError, naming field and value, for anything but the scheme that is served."""
        for field, wanted in _SERVED.items():
            if config.get(field) != wanted:
                refuse(f"{field} = {config.get(field)!r} ({wanted!r} is)")
        return CompressedTensorsWeightSchema()


@dataclass(frozen=True)
class HummingWeightSchema(BaseWeightSchema):
    """INT4 codes (value + 8), a bfloat16 scale for 32 of them along K."""

    b_dtype: DataType = _UINT4
    bs_dtype: DataType = _BFLOAT16
    weight_scale_group_size: int = 32
    weight_scale_group_size_n: int = 1
    hadamard_block_size: int = 0
    has_zero_point: bool = False

    def __post_init__(self) -> None:
        other = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if other:
            refuse(f"weights with {', '.join(f'{name} = {getattr(self, name)}' for name in other)}")

    def to_humming_schema(self, param_dtype: torch.dtype) -> HummingWeightSchema:
        _check_parameters(param_dtype)
        return self

    def requant_tensors(self, **_: object) -> Tensors:
        refuse("quantising weights again")


@dataclass(frozen=True)
class CompressedTensorsWeightSchema(BaseWeightSchema):
    """compressed-tensors' pack-quantized INT4, groups of 32."""

    def to_humming_schema(self, param_dtype: torch.dtype) -> HummingWeightSchema:
        return HummingWeightSchema().to_humming_schema(param_dtype)

    def convert_humming(
        self,
        tensors: Tensors,
        shape_n_stacks: Sequence[int],
        shape_k_stacks: Sequence[int],
        param_dtype: torch.dtype,
        num_experts: int | None = None,
    ) -> tuple[HummingWeightSchema, Tensors]:
        """The checkpoint's tensors under the names of the next step, not copied.

        tensors: weight_packed int32 [E, N, K / 8], weight_scale [E, N, K / 32]. Raises NotImplementedError for others.
        """
        _check_parameters(param_dtype)
        if num_experts is None:
            refuse("a linear layer")
        for name in tensors:
            if name not in (*_LOADED, *_IGNORED):
                refuse(f"a tensor {name} beside the codes and scales of experts")
        return HummingWeightSchema(), {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}


@dataclass(frozen=True)
class BaseInputSchema:
    """Activations."""


@dataclass(frozen=True)
class HummingInputSchema(BaseInputSchema):
    """Activations as they are: bfloat16."""

    a_dtype: DataType | None = None
    input_scale_group_size: int = 0
    input_scale_dtype: DataType | None = None
    input_quant_mode: InputQuantizationMode = InputQuantizationMode.Disabled
    static_tensor_scale_name: str | None = None

    def __post_init__(self) -> None:
        quantised = self.a_dtype is not None and self.a_dtype.num_bits != 16
        if quantised or self.input_quant_mode.should_quantize:
            refuse(f"quantised activations ({self.a_dtype}, {self.input_quant_mode.value})")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> HummingInputSchema:
        """Raises NotImplementedError for VLLM_HUMMING_INPUT_QUANT_CONFIG with anything in it."""
        if config:
            refuse(f"VLLM_HUMMING_INPUT_QUANT_CONFIG = {dict(config)!r}")
        return cls()

    def to_humming_schema(self, param_dtype: torch.dtype) -> HummingInputSchema:
        return self

    def convert_humming(self, **_: object) -> tuple[HummingInputSchema, Tensors]:
        return self, {}

    def is_compatible_with(self, weight_schema: BaseWeightSchema, param_dtype: torch.dtype) -> bool:
        return param_dtype == torch.bfloat16


def _check_parameters(param_dtype: torch.dtype) -> None:
    if param_dtype != torch.bfloat16:
        refuse(f"parameters of {param_dtype} (--dtype bfloat16 is)")


_UNSERVED = {
    "AWQWeightSchema": "AWQ",
    "BitnetWeightSchema": "BitNet",
    "CompressedTensorsInputSchema": "quantised activations",
    "Fp8InputSchema": "FP8 activations",
    "Fp8WeightSchema": "FP8 weights",
    "GPTQWeightSchema": "GPTQ",
    "GptOssMxfp4WeightSchema": "MXFP4 weights",
    "ModeloptMxfp8WeightSchema": "MXFP8 weights",
    "ModeloptNvfp4InputSchema": "NVFP4 activations",
    "ModeloptNvfp4WeightSchema": "NVFP4 weights",
    "Mxfp4WeightSchema": "MXFP4 weights",
}
globals().update({name: unserved(name, title) for name, title in _UNSERVED.items()})

__all__ = [
    "BaseInputSchema",
    "BaseWeightSchema",
    "CompressedTensorsWeightSchema",
    "HummingInputSchema",
    "HummingWeightSchema",
    *_UNSERVED,
]
