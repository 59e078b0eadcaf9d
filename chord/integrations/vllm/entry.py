"""What vLLM sees before a model is chosen: a quantization config without weight, so that starting vLLM stays quick."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from chord.integrations.vllm import NAME

CHECKPOINTS = "compressed-tensors"
"""The quant_method of checkpoints that are read."""


class ChordEntry(QuantizationConfig):
    """Stands for the method in vLLM's table; `from_config` gives the config that does the work."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        """The name when the user asked for it, else None. Raises ValueError when the checkpoint is of another kind."""
        if user_quant != NAME:
            return None
        found = hf_quant_cfg.get("quant_method")
        if found != CHECKPOINTS:
            raise ValueError(
                f"--quantization {NAME}: expected a checkpoint whose quant_method is {CHECKPOINTS}, got {found!r}; "
                "leave the option out for this model"
            )
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from chord.integrations.vllm.config import ChordConfig

        return ChordConfig.from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        """Never asked: vLLM asks what from_config returned."""
        raise NotImplementedError("expected the config that from_config returns")


def register() -> None:
    register_quantization_config(NAME)(ChordEntry)
