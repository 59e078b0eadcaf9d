"""vLLM's own MoE code in a bare environment: its published package, imported without what its servers need.

`start()` must run before anything imports vllm. What is absent and not needed here is left empty; on a machine without
a GPU the platform says it is an H100's and vLLM's compiled routing operators are replaced by torch. The classes that
are exercised (configs, layers, loaders, oracle, kernels' glue, experts) are vLLM's, unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch

from chord.w4a16.reference import contract_weights

LEFT_OUT = (
    "vllm.distributed.kv_transfer",
    "vllm.entrypoints",
    "vllm.models",
    "vllm.multimodal",
    "vllm.reasoning",
    "vllm.vllm_flash_attn",
    "vllm._C_stable_libtorch",
)
"""Parts of vLLM that routed experts do not touch, but that its imports reach."""
OPTIONAL = (
    "PIL", "aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "cpuinfo", "einops", "jsonschema", "loguru",
    "openai_harmony", "psutil", "pybase64", "requests", "urllib3", "uvloop", "zmq",
)  # fmt: skip
"""Packages that may be absent."""
OPERATORS = {
    "moe_align_block_size": "(Tensor topk_ids, int num_experts, int block_size, Tensor(a!) sorted_token_ids,"
    " Tensor(b!) experts_ids, Tensor(c!) num_tokens_post_pad, Tensor? maybe_expert_map,"
    " Tensor(d!)? scatter_idx=None) -> ()",
    "moe_permute_with_scratch": "(Tensor input, Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map,"
    " int n_expert, int n_local_expert, int topk, Tensor(a!) permuted_input, Tensor(b!) expert_first_token_offset,"
    " Tensor(c!) inv_permuted_idx, Tensor(d!) permuted_idx, Tensor(e!) sort_workspace,"
    " Tensor(f!) permuted_experts_id, Tensor(g!) sorted_row_idx, Tensor(h!) topk_ids_for_sort) -> ()",
    "moe_prepare_scatter": "(Tensor topk_ids, Tensor token_expert_indices, Tensor? expert_map, int n_expert,"
    " int n_local_expert, Tensor(a!) expert_first_token_offset, Tensor(b!) scatter_idx, Tensor(c!) sort_workspace,"
    " Tensor(d!) sorted_experts, Tensor(e!) sorted_rows, Tensor(f!) topk_ids_for_sort) -> ()",
    "moe_unpermute": "(Tensor permuted_hidden_states, Tensor topk_weights, Tensor inv_permuted_idx,"
    " Tensor? expert_first_token_offset, int topk, Tensor(a!) hidden_states) -> ()",
    "moe_permute_unpermute_supported": "() -> bool",
    "moe_permute_sort_workspace_size": "(int num_expanded_rows, int n_expert) -> int",
}
"""vLLM's compiled routing operators, as it declares them, that a CPU has in torch here."""
_LIBRARIES: list[torch.library.Library] = []


class _Anything(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda cls, _: cls)}
        value = type(name, (), members)
        setattr(self, name, value)
        return value


class _LeaveOut(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == one or name.startswith(f"{one}.") for one in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def start() -> None:
    """Makes vLLM's MoE code importable and usable here. Once per process."""
    if any(isinstance(finder, _LeaveOut) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _LeaveOut(LEFT_OUT))
    sys.meta_path.append(_LeaveOut(OPTIONAL))
    capabilities = torch.library.Library("_C", "FRAGMENT")
    for name in ("block_fp8", "fp8", "fp4"):
        _define(capabilities, f"cutlass_scaled_mm_supports_{name}", "(int cap) -> bool", lambda *_: False)
    _define(capabilities, "cutlass_group_gemm_supported", "(int cap) -> bool", lambda *_: False)
    if not torch.cuda.is_available():
        library = torch.library.Library("_moe_C", "FRAGMENT")
        for name, schema in OPERATORS.items():
            _define(library, name, schema, globals()[f"_{name}"])
        _pretend_h100()
    import vllm.model_executor.layers.fused_moe  # noqa: F401
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not torch.cuda.is_available():
        torch.accelerator.empty_cache = lambda: None  # what growing the workspace asks for


def _define(library: torch.library.Library, name: str, schema: str, implementation: object) -> None:
    library.define(name + schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


def _pretend_h100() -> None:
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "H100, by pretence"

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    platforms._current_platform = H100()


def _sorted_pairs(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> list[list[int]]:
    """Pairs of each local expert, ascending; ids outside the experts count for nothing."""
    local = len(ids) if expert_map is None else int(expert_map.max()) + 1
    found: list[list[int]] = [[] for _ in range(experts if expert_map is None else local)]
    for pair, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < experts:
            place = expert if expert_map is None else int(expert_map[expert])
            if place >= 0:
                found[place].append(pair)
    return found


def _moe_align_block_size(topk_ids, num_experts, block_size, sorted_ids, expert_ids, padded, expert_map, scatter=None):
    sorted_ids.fill_(-12345)
    expert_ids.fill_(-12345)
    slot = 0
    for expert, pairs in enumerate(_sorted_pairs(topk_ids, num_experts, expert_map)):
        filled = pairs + [topk_ids.numel()] * (-len(pairs) % block_size)
        sorted_ids[slot : slot + len(filled)] = torch.tensor(filled, dtype=torch.int32)
        expert_ids[slot // block_size : (slot + len(filled)) // block_size] = expert
        slot += len(filled)
    padded.fill_(slot)
    if scatter is not None:
        scatter.fill_(-1)
        rows = [pair for pairs in _sorted_pairs(topk_ids, num_experts, expert_map) for pair in pairs]
        scatter[rows, 0] = torch.tensor(rows, dtype=torch.int32)


def _moe_prepare_scatter(topk_ids, _indices, expert_map, experts, local, offsets, scatter, *_):
    rows = _sorted_pairs(topk_ids, experts, expert_map)
    offsets[:] = torch.tensor([0, *(len(pairs) for pairs in rows)]).cumsum(0)
    order = [pair for pairs in rows for pair in pairs]
    order += sorted(set(range(topk_ids.numel())) - set(order))
    scatter.view(-1)[order] = torch.arange(topk_ids.numel(), dtype=torch.int32)


def _moe_permute_with_scratch(x, topk_ids, indices, expert_map, experts, local, topk, rows, offsets, inverse, permuted, *_):
    _moe_prepare_scatter(topk_ids, indices, expert_map, experts, local, offsets, inverse)
    for pair, row in enumerate(inverse.flatten().tolist()):
        permuted[row] = pair
        if row < int(offsets[-1]):
            rows[row] = x[pair // topk]


def _moe_unpermute(rows, weights, inverse, offsets, topk, out):
    found = torch.where((inverse < offsets[-1]).view(-1, 1), rows.view(inverse.numel(), -1)[inverse.long()].float(), 0.0)
    out.copy_((found.view(-1, topk, out.shape[-1]) * weights.float().unsqueeze(-1)).sum(1).to(out.dtype))


def _moe_permute_unpermute_supported() -> bool:
    return True


def _moe_permute_sort_workspace_size(rows: int, experts: int) -> int:
    return 1


def mul_sum(inputs, topk_weights, outputs=None, topk_ids=None, expert_map=None, num_valid_tokens=None):
    """What vLLM's Triton kernel of this name does, for a CPU: rows without any id are left as they are."""
    taken = topk_ids >= 0
    if expert_map is not None:
        taken &= expert_map[topk_ids.clamp(min=0).long()] >= 0
    found = torch.where(taken.unsqueeze(-1), inputs.float() * topk_weights.float().unsqueeze(-1), 0.0).sum(1)
    some = (topk_ids >= 0).any(1)
    outputs[some] = found[some].to(outputs.dtype)
    return outputs


def moe_config(
    *,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    backend: str = "auto",
    **changes: object,
):
    """vLLM's FusedMoEConfig of one rank; tp and ep are (rank, size)."""
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


def quantization_config(**weights: object) -> dict[str, object]:
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


def routed_experts(config: object, quantization: object, name: str = "model.layers.1.mlp.experts"):
    """vLLM's RoutedExperts of one rank, with parameters ready to be loaded."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    with torch.device(config.device):
        manager = ExpertMapManager(
            max_num_batched_tokens=8192, top_k=config.experts_per_token, global_num_experts=config.num_experts,
            num_redundant_experts=0, num_expert_group=None, moe_parallel_config=config.moe_parallel_config,
            placement_strategy="linear", enable_eplb=False,
        )  # fmt: skip
        return RoutedExperts(name, torch.bfloat16, config, quantization, expert_map_manager=manager)


def no_data_parallel():
    """A context in which vLLM's forward code finds a forward context."""
    from vllm.forward_context import override_forward_context

    return override_forward_context(SimpleNamespace(dp_metadata=None))


class Weights(NamedTuple):
    """One layer's experts on one rank, as a checkpoint has them."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def fill(layer: torch.nn.Module, seed: int) -> Weights:
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


def routed(tokens: int, config: object, seed: int, *, missing: bool = False) -> Routed:
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
    out = torch.zeros(given.x.shape, device=given.x.device)
    for expert in local[local >= 0].unique().tolist():
        token, route = (local == expert).nonzero(as_tuple=True)
        w13 = contract_weights(weights.w13[expert], weights.w13_scale[expert]).float()
        w2 = contract_weights(weights.w2[expert], weights.w2_scale[expert]).float()
        gate, up = (given.x[token].float() @ w13.T).chunk(2, dim=1)
        result = (torch.nn.functional.silu(gate) * up) @ w2.T
        out.index_add_(0, token, result * given.weights[token, route].unsqueeze(1))
    return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of `wanted`; NaN if either has one."""
    return float((found.float() - wanted).norm() / wanted.norm())


def run(layer: torch.nn.Module, given: Routed) -> torch.Tensor:
    """The layer's apply, as vLLM's runner calls it."""
    with no_data_parallel():
        return layer.quant_method.apply(layer, given.x, given.weights, given.ids, None, None)


def poison_workspaces() -> None:
    """NaN in every byte pair of the workspaces that vLLM lends to experts."""
    from vllm.v1.worker.workspace import current_workspace_manager

    for workspace in current_workspace_manager()._current_workspaces:
        if workspace is not None:
            workspace.fill_(255)
