"""How SGLang's routed experts are loaded, packed and run: as a direct kernel, to which SGLang gives local ids."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_exec, get_lora
from sglang.srt.utils import set_weight_attrs

from chord.integrations import layers, moe, slabs
from chord.w4a16 import PackedW4A16

_log = logging.getLogger(__name__)


class ChordMoEMethod(FusedMoEMethodBase):
    """INT4 experts of one layer. Raises ValueError for a layer or a deployment that is not served."""

    fuse_routed_scaling_factor_in_topk = True
    """Asks SGLang for router weights that hold the scaling factor already."""

    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name
        self._weights: list[PackedW4A16] = []
        self._invariant = False

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,  # noqa: ANN401 - of the loader's
    ) -> None:
        """Parameters under the names of compressed-tensors: two views of one buffer for each projection."""
        if params_dtype != torch.bfloat16:
            self._refuse(f"parameters of {params_dtype}, use --dtype bfloat16")
        if with_bias:
            self._refuse("biases of experts")
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        attributes = {**extra_weight_attrs, "is_transposed": False, "quant_method": "group"}
        for name, shape in layers.projections(self.layer_name, *sizes):
            for parameter in slabs.register_parameters(layer, name, shape):
                set_weight_attrs(parameter, attributes)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:  # noqa: ANN401
        """Keeps SGLang's settings of the layer; there is no runner, so that ids arrive as local ones."""
        config = moe_runner_config
        if config.activation != "silu" or not config.is_gated:
            self._refuse(f"the activation {config.activation}")
        for field in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"):
            if getattr(config, field, None) is not None:
                self._refuse(f"a clamped SwiGLU, {field} = {getattr(config, field)}")
        for field in ("apply_router_weight_on_input", "no_combine"):
            if getattr(config, field):
                self._refuse(f"{field} = True")
        self._check_server()
        self.moe_runner_config = config

    def _check_server(self) -> None:
        """What the command line asks of all layers."""
        settings = get_exec()
        if get_lora().enable_lora:
            self._refuse("LoRA on routed experts (--enable-lora)")
        if settings.moe.enable_eplb or settings.moe.ep_num_redundant_experts:
            self._refuse("expert load balancing (--enable-eplb, --ep-num-redundant-experts)")
        backend = get_moe_a2a_backend()
        if not backend.is_none():
            self._refuse(f"--moe-a2a-backend {backend.value} (none is)")
        self._invariant = bool(settings.deterministic.enable_deterministic_inference)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs expert by expert, in place, and loads every kernel that the layer can need."""
        self._weights = [slabs.pack_parameters(layer, "w13", gated=True), slabs.pack_parameters(layer, "w2")]
        shapes = [packed.shape for packed in self._weights]
        programs = moe.preload(self._weights[0].device, shapes, moe.INDEXED)
        layers.say_once(_log, type(self).__name__, programs)

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:  # noqa: ANN401 - SGLang's
        """[M, H] from the tokens and their local ids, -1 for what is elsewhere; memory comes from torch's allocator."""
        if not dispatch_output.format.is_standard():
            self._refuse(f"the dispatch format {dispatch_output.format} (--moe-a2a-backend none is)")
        x = dispatch_output.hidden_states.contiguous()
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        out = torch.empty_like(x)
        if x.shape[0]:
            self._run(x, topk_weights, topk_ids, out)
        return StandardCombineInput(hidden_states=out)

    def _run(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor) -> None:
        w13, w2 = self._weights
        (tokens, top_k), experts = topk_ids.shape, w13.shape.experts
        pairs = tokens * top_k
        rows = [(torch.bfloat16, (pairs, w2.shape.k)), (torch.bfloat16, (pairs, w2.shape.n))]
        pieces: list[moe.Piece] = [*rows, *moe.routing_pieces(tokens, top_k), *moe.plan_pieces(tokens, top_k, experts)]
        memory = torch.empty(moe.bytes_of(pieces), dtype=torch.uint8, device=x.device)
        hidden, routed, ids_room, weights_room, *plan_pieces = moe.cut(memory, pieces)
        ids, weights = moe.routing(topk_ids, topk_weights, (ids_room, weights_room))
        plan = moe.make_plan(ids, plan_pieces, experts, experts, None)
        expected = -(-pairs // self.moe_runner_config.num_experts)
        moe.indexed(
            x, w13, w2, plan, weights, ids, hidden, routed, out,
            num_experts=experts, expert_map=None, expected_rows=expected, invariant=self._invariant,
        )  # fmt: skip

    def _refuse(self, what: str) -> None:
        raise ValueError(f"{self.layer_name}: --quantization chord does not serve {what}; leave the option out")
