"""The quantization config: SGLang's for compressed-tensors, except that routed experts are chord's."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from chord.integrations.projections import check_projection
from chord.integrations.sglang import NAME

CHECKPOINTS = ("compressed-tensors", "compressed_tensors")
"""The quant_method of checkpoints that are read."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ChordConfig(CompressedTensorsConfig):
    """Every layer but routed experts goes where SGLang sends it."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> str | None:
        """The name when the user asked for it, else None. Raises ValueError when the checkpoint is of another kind."""
        if user_quant != NAME:
            return None
        found = hf_quant_cfg.get("quant_method")
        if found not in CHECKPOINTS:
            raise ValueError(
                f"--quantization {NAME}: expected a checkpoint whose quant_method is {CHECKPOINTS[0]}, got {found!r}; "
                "leave the option out for this model"
            )
        return NAME

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:  # noqa: ANN401 - of SGLang's many kinds
        """Raises ValueError, naming layer, field and value, for routed experts that the kernels do not serve."""
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

        if not isinstance(layer, FusedMoE):
            return super().get_quant_method(layer, prefix)
        from chord.integrations.sglang.method import ChordMoEMethod

        self._add_fused_moe_to_target_scheme_map()
        for name in PROJECTIONS:
            expert = f"{prefix}.0.{name}"
            check_projection(self.get_scheme_dict(layer, expert), expert, NAME, self.quant_format)
        return ChordMoEMethod(prefix)
