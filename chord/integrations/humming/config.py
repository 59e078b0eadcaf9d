"""Settings of a layer, as vLLM reads them between loading and launching."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from chord.integrations.humming.dtypes import DataType
from chord.w4a16 import WeightShape


class GemmType(str, Enum):
    """How the rows of experts come."""

    DENSE = "dense"
    INDEXED = "indexed"
    GROUPED_CONTIGUOUS = "grouped_contiguous"
    GROUPED_MASKED = "grouped_masked"


class WeightScaleType(str, Enum):
    """What shares a scale."""

    GROUP = "group"
    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"
    GROUP_TENSOR = "group_tensor"


class WeightScale2Type(str, Enum):
    """A second level of scales: none here."""

    NONE = "none"
    CHANNEL = "channel"
    TENSOR = "tensor"


class MmaType(str, Enum):
    """Which tensor-core instructions run. The registry's routes decide."""

    MMA = "mma"
    WGMMA = "wgmma"


class InputQuantizationMode(str, Enum):
    """How activations are quantised. Disabled is what is served."""

    Disabled = "disabled"
    StaticTensor = "static_tensor"
    DynamicToken = "dynamic_token"
    DynamicGroup = "dynamic_group"
    DynamicGroupToken = "dynamic_group_token"
    StaticTensorDynamicGroup = "static_tensor_dynamic_group"

    @property
    def should_quantize(self) -> bool:
        return self is not InputQuantizationMode.Disabled

    @property
    def has_group_scale(self) -> bool:
        return "group" in self.value

    @property
    def has_secondary_scale(self) -> bool:
        return self in (InputQuantizationMode.DynamicGroupToken, InputQuantizationMode.StaticTensorDynamicGroup)


@dataclass(frozen=True)
class LayerConfig:
    """One projection of all experts, packed. Sizes are those of the weights: nothing is padded."""

    num_experts: int
    shape_n: int
    shape_k: int
    device_index: int | None
    """The CUDA device of the weights; None on a CPU."""
    a_dtype: DataType
    c_dtype: DataType
    pad_shape_n: int = 0
    pad_shape_k: int = 0
    input_quant_mode: InputQuantizationMode = InputQuantizationMode.Disabled

    @property
    def shape(self) -> WeightShape:
        return WeightShape(self.num_experts, self.shape_n, self.shape_k)
