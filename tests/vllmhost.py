"""vLLM's own MoE code in a bare environment: its published package, imported without what its servers need.

`start()` must run before anything imports vllm. What is absent and not needed here is left empty; on a machine without
a GPU the platform says it is an H100's and vLLM's compiled routing operators are replaced by torch. The classes that
are exercised (configs, layers, loaders, oracle, kernels' glue, experts) are vLLM's, unchanged.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import torch

from leftout import LeaveOut

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


def start() -> None:
    """Makes vLLM's MoE code importable and usable here. Once per process."""
    if any(isinstance(finder, LeaveOut) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, LeaveOut(LEFT_OUT, _Anything))
    sys.meta_path.append(LeaveOut(OPTIONAL, _Anything))
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


def _moe_permute_with_scratch(
    x, topk_ids, indices, expert_map, experts, local, topk, rows, offsets, inverse, permuted, *_
):
    _moe_prepare_scatter(topk_ids, indices, expert_map, experts, local, offsets, inverse)
    for pair, row in enumerate(inverse.flatten().tolist()):
        permuted[row] = pair
        if row < int(offsets[-1]):
            rows[row] = x[pair // topk]


def _moe_unpermute(rows, weights, inverse, offsets, topk, out):
    found = torch.where(
        (inverse < offsets[-1]).view(-1, 1), rows.view(inverse.numel(), -1)[inverse.long()].float(), 0.0
    )
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
