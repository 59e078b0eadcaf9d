"""How routed experts are loaded, packed and bound to vLLM's modular kernel."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig, int4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt4Static32
from vllm.model_executor.utils import set_weight_attrs

from chord.integrations import layers, moe, slabs
from chord.integrations.vllm.experts import ChordExperts, experts_for
from chord.integrations.vllm.limits import check_layer
from chord.w4a16 import PackedW4A16

_log = logging.getLogger(f"vllm.{__name__}")


class ChordMoEMethod(FusedMoEMethodBase):
    """INT4 experts of one layer. Raises ValueError when made for a layer or a deployment that is not served."""

    def __init__(self, config: FusedMoEConfig, layer_name: str) -> None:
        super().__init__(config)
        self.layer_name = layer_name
        check_layer(config, layer_name, silu=MoEActivation.SILU)
        _say_what_is_not_heeded(config.moe_backend)
        self.experts_cls: type[ChordExperts] = experts_for(config)
        supported, reason = self.experts_cls.is_supported_config(
            self.experts_cls, config, kInt4Static32, None, self.experts_cls.activation_format()
        )
        if not supported:
            raise ValueError(f"{layer_name}: --quantization chord cannot serve this deployment: {reason}")
        self._weights: list[PackedW4A16] = []

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ANN401 - of the loader's
    ) -> None:
        """Parameters under the names of compressed-tensors: two views of one buffer for each projection.

        Raises ValueError for types, sizes and settings that are not served.
        """
        if params_dtype != torch.bfloat16:
            raise ValueError(f"{self.layer_name}: expected bfloat16 parameters (--dtype bfloat16), got {params_dtype}")
        if getattr(layer, "apply_router_weight_on_input", False):
            raise ValueError(
                f"--quantization chord does not serve router weights on the input of experts ({self.layer_name}); "
                "leave --quantization chord out"
            )
        attributes = {**extra_weight_attrs, "is_transposed": False, "quant_method": "group"}
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        for name, shape in layers.projections(self.layer_name, *sizes):
            for parameter in slabs.register_parameters(layer, name, shape):
                set_weight_attrs(parameter, attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs expert by expert, in place, and loads every kernel that the layer can need."""
        self._weights = [slabs.pack_parameters(layer, "w13", gated=True), slabs.pack_parameters(layer, "w2")]
        device = self._weights[0].device
        programs = moe.preload(device, [packed.shape for packed in self._weights], self.experts_cls.operators)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = self._make_kernel(layer)
        layers.say_once(_log, self.experts_cls.__name__, programs)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """16-bit activations; the scales lie among the packed bytes."""
        return int4_w4a16_moe_quant_config(w1_scale=None, w2_scale=None)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ANN401 - vLLM's SharedExperts, if any
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """[M, H] from x [M, H] and vLLM's routing."""
        result: torch.Tensor = self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return result

    def _make_kernel(self, layer: torch.nn.Module) -> mk.FusedMoEKernel:
        routing = maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),  # type: ignore[operator]
            allow_new_interface=True,
            use_monolithic=False,
        )
        sizes = {}
        if self.experts_cls.batched():
            sizes = {"max_num_tokens": routing.max_num_tokens_per_rank(), "num_dispatchers": routing.num_dispatchers()}
        experts = self.experts_cls(self._weights[0], self._weights[1], self.moe, self.moe_quant_config, **sizes)
        return mk.FusedMoEKernel(routing, experts)


@cache
def _say_what_is_not_heeded(backend: str) -> None:
    """Once for each: that a backend was asked for of which the quantization method leaves nothing to choose."""
    if backend != "auto":
        _log.warning(
            "--moe-backend %s chooses among vLLM's own kernels and changes nothing for INT4 experts here: "
            "--quantization chord has them run on chord's. Leave one of the two options out",
            backend,
        )
