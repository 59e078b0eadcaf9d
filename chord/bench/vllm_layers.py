"""One layer of routed experts on one rank, built of vLLM's own classes: to be checked and timed without a model.

Needs vLLM. What a model's loader would do, `fill` does with random numbers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from chord.w4a16.reference import expert_weights, rows_by_expert

Rank = tuple[int, int]
"""(rank, size) of a group."""


def moe_config(
    *,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tp: Rank = (0, 1),
    ep: Rank = (0, 1),
    backend: str = "auto",
    **changes: Any,  # noqa: ANN401 - of its fields
) -> Any:  # noqa: ANN401 - here and below: vLLM's types
    """The FusedMoEConfig of one rank."""
    from vllm.model_executor.layers.fused_moe import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    parallel = FusedMoEParallelConfig(
        tp_size=tp[1], tp_rank=tp[0], pcp_size=1, pcp_rank=0, dp_size=1, dp_rank=0, ep_size=ep[1], ep_rank=ep[0],
        sp_size=1, use_ep=ep[1] > 1, all2all_backend="allgather_reducescatter",
        enable_eplb=bool(changes.pop("eplb", False)),
    )  # fmt: skip
    arguments = {
        "num_experts": experts, "experts_per_token": top_k, "hidden_dim": hidden, "intermediate_size": intermediate,
        "num_local_experts": experts // ep[1], "num_logical_experts": experts, "activation": MoEActivation.SILU,
        "device": "cuda" if torch.cuda.is_available() else "cpu", "routing_method": RoutingMethodType.Default,
        "moe_parallel_config": parallel, "in_dtype": torch.bfloat16, "moe_backend": backend,
    }  # fmt: skip
    return FusedMoEConfig(**(arguments | changes))


def quantization_config(**weights: object) -> dict[str, Any]:
    """A checkpoint's quantization_config as Kimi's INT4 checkpoints have it, with changes to `weights`."""
    scheme = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None,
        "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": scheme | weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    }


def routed_experts(
    config: Any,  # noqa: ANN401
    quantization: Any,  # noqa: ANN401
    name: str = "model.layers.1.mlp.experts",
    **more: Any,  # noqa: ANN401 - of its arguments
) -> Any:  # noqa: ANN401
    """The RoutedExperts of one rank, with parameters ready to be loaded."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    with torch.device(config.device):
        manager = ExpertMapManager(
            max_num_batched_tokens=8192, top_k=config.experts_per_token, global_num_experts=config.num_experts,
            num_redundant_experts=0, num_expert_group=None, moe_parallel_config=config.moe_parallel_config,
            placement_strategy="linear", enable_eplb=False,
        )  # fmt: skip
        return RoutedExperts(name, torch.bfloat16, config, quantization, expert_map_manager=manager, **more)


def no_data_parallel() -> Any:  # noqa: ANN401
    """A context in which vLLM's forward code finds a forward context."""
    from vllm.forward_context import override_forward_context

    return override_forward_context(SimpleNamespace(dp_metadata=None))


class Weights(NamedTuple):
    """One layer's experts on one rank, as a checkpoint has them."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def fill(layer: Any, seed: int) -> Weights:  # noqa: ANN401
    """Random codes and scales for a layer that waits for its checkpoint; a copy of them."""
    parameters = dict(layer.named_parameters())
    kept = []
    for name in ("w13", "w2"):
        codes, scale = parameters[f"{name}_weight_packed"].data, parameters[f"{name}_weight_scale"].data
        random = torch.Generator(codes.device).manual_seed(seed)
        seed += 1
        words = torch.randint(-(1 << 31), 1 << 31, codes.shape, generator=random, device=codes.device)
        codes.copy_(words.to(torch.int32))
        scale.copy_(torch.rand(scale.shape, generator=random, device=scale.device) * 0.01 + 0.001)
        kept += [codes.clone(), scale.clone()]
    return Weights(*kept)


class Routed(NamedTuple):
    """Tokens with their routes."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def routed(tokens: int, config: Any, seed: int, *, missing: bool = False) -> Routed:  # noqa: ANN401
    """Random tokens with distinct global experts. missing: a tenth of the routes is -1, as are all of the last row."""
    device, top_k = torch.device(config.device), config.experts_per_token
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, config.hidden_dim, generator=random, device=device).to(torch.bfloat16)
    scores = torch.rand(tokens, config.num_experts, generator=random, device=device)
    chosen = scores.topk(top_k)
    ids, weights = chosen.indices.to(torch.int32), chosen.values / chosen.values.sum(1, keepdim=True)
    if missing:
        ids[torch.rand(ids.shape, generator=random, device=device) < 0.1] = -1
        ids[-1] = -1
    return Routed(x, weights, ids)


def reference(weights: Weights, given: Routed, expert_map: torch.Tensor | None) -> torch.Tensor:
    """The layer in float32 on dequantised bfloat16 weights, each expert in turn: [M, H] float32."""
    local = given.ids.long()
    if expert_map is not None:
        local = torch.where(local < 0, -1, expert_map[local.clamp(min=0)].long())
    out, top_k = torch.zeros(given.x.shape, device=given.x.device), given.ids.shape[1]
    rows = rows_by_expert(local.flatten())
    both = (expert_weights(weights.w13, weights.w13_scale, rows), expert_weights(weights.w2, weights.w2_scale, rows))
    for (expert, w13), (_, w2) in zip(*both, strict=True):
        token = rows[expert] // top_k
        gate, up = (given.x[token].float() @ w13.float().T).chunk(2, dim=1)
        result = (torch.nn.functional.silu(gate) * up) @ w2.float().T
        out.index_add_(0, token, result * given.weights.flatten()[rows[expert]].unsqueeze(1))
    return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of `wanted`; NaN if either has one."""
    return float((found.float() - wanted).norm() / wanted.norm())


def run(layer: Any, given: Routed) -> torch.Tensor:  # noqa: ANN401
    """The layer's apply, as vLLM's runner calls it."""
    with no_data_parallel():
        found: torch.Tensor = layer.quant_method.apply(layer, given.x, given.weights, given.ids, None, None)
    return found


def poison_workspaces() -> None:
    """NaN in every byte pair of the workspaces that vLLM lends to experts."""
    from vllm.v1.worker.workspace import current_workspace_manager

    for workspace in current_workspace_manager()._current_workspaces:
        if workspace is not None:
            workspace.fill_(255)
