"""The quantization config: vLLM's for compressed-tensors, except that routed experts are chord's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from chord.integrations.projections import check_projection
from chord.integrations.vllm import NAME
from chord.integrations.vllm.method import ChordMoEMethod


class ChordConfig(CompressedTensorsConfig):
    """Every layer but routed experts goes where vLLM sends it: this is a CompressedTensorsConfig to all that ask."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:  # noqa: ANN401 - of vLLM's many kinds
        """Raises ValueError, naming layer, field and value, for routed experts that the kernels do not serve."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
        for name in names:
            expert = f"{prefix}.0.{name}"
            check_projection(self.get_scheme_dict(layer, expert), expert, NAME)
        return ChordMoEMethod(layer.moe_config, prefix)
