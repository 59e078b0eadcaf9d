"""What of a layer's configuration is not served, each refused by name. Needs no vLLM: it only reads attributes."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class ParallelConfig(Protocol):
    """What is read of vLLM's FusedMoEParallelConfig."""

    enable_eplb: bool


class MoEConfig(Protocol):
    """What is read of vLLM's FusedMoEConfig."""

    activation: Any
    has_bias: bool
    in_dtype: torch.dtype
    is_lora_enabled: bool
    moe_parallel_config: ParallelConfig
    swiglu_alpha: float | None
    swiglu_beta: float | None
    swiglu_limit: float | None


def check_layer(config: MoEConfig, name: str, *, silu: object) -> None:
    """Raises ValueError for the first thing that is not served. silu: vLLM's name of the SwiGLU activation."""
    clamps = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    given = [f"{field} = {getattr(config, field)}" for field in clamps if getattr(config, field) is not None]
    refused = {
        f"LoRA on routed experts ({name})": (config.is_lora_enabled, "leave --enable-lora out"),
        f"expert load balancing ({name})": (config.moe_parallel_config.enable_eplb, "leave --enable-eplb out"),
        f"biases of experts ({name})": (config.has_bias, ""),
        f"activations of {config.in_dtype} ({name})": (config.in_dtype != torch.bfloat16, "use --dtype bfloat16"),
        f"the activation {config.activation} ({name})": (config.activation != silu, ""),
        f"a clamped SwiGLU, {', '.join(given)} ({name})": (bool(given), ""),
    }
    for what, (found, advice) in refused.items():
        if found:
            way_out = f"{advice}, or " if advice else ""
            raise ValueError(f"--quantization chord does not serve {what}; {way_out}leave --quantization chord out")
