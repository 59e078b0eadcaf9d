"""The peers of a whole layer: Humming's kernels between vLLM's routing operators, strung together as vLLM does it.

Selection, plan or sort are vLLM's compiled operators; both GEMMs, the activation and the copy into the order of experts
are humming-kernels'. The grouped chain is summed by vLLM's compiled operator, as in vLLM. The indexed one is summed
there by a Triton kernel of vLLM's Python package: chord's own moe_combine stands in for it, which for few tokens is
several times as fast as the compiled operator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chord.bench.w4a16_peers import Humming, vllm_operators
from chord.w4a16 import WeightShape
from chord.w4a16.rows import combine_rows

TOP_K = 8
_SIGMOID = 1  # vLLM's number for it


class LayerWork(NamedTuple):
    """One token batch before its router. expert_map: int32 [E], local id or -1; None where every expert is here."""

    logits: torch.Tensor
    bias: torch.Tensor
    x: torch.Tensor
    expert_map: torch.Tensor | None

    @property
    def pairs(self) -> int:
        return self.logits.shape[0] * TOP_K


class LayerWeights(NamedTuple):
    """Both projections of the experts that are here, as a checkpoint has them: words and scales."""

    shapes: tuple[WeightShape, WeightShape]
    words: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]


class Chain(NamedTuple):
    """A layer's kernels bound to their buffers. `call` launches them in order and writes `out` [M, H] bfloat16."""

    call: Callable[[], object]
    out: torch.Tensor
    programs: tuple[str, ...] = ()


class HummingChains:
    """Chains of humming-kernels and vLLM's operators over one set of weights at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError naming the folder when it lacks a part: half a chain is no peer."""
        try:
            self._humming = Humming(folder)
            self.versions = {"humming": self._humming.version, "vllm": vllm_operators(folder)}
        except (ImportError, OSError, RuntimeError) as error:
            raise ValueError(f"{folder}: expected a folder with Humming's wheel and vLLM's library: {error}") from error
        self._ops = torch.ops._moe_C
        self._kept: tuple[LayerWeights, list[Any]] | None = None

    def chains(self, work: LayerWork, weights: LayerWeights) -> dict[str, Callable[[], Chain]]:
        """humming_indexed and humming_grouped: makers, as each may refuse the work."""
        return {
            "humming_indexed": lambda: self._indexed(work, self._layers(weights)),
            "humming_grouped": lambda: self._grouped(work, self._layers(weights)),
        }

    def forget(self) -> None:
        """Gives the packed weights' memory back."""
        self._kept = None

    def _layers(self, weights: LayerWeights) -> list[Any]:
        if self._kept is None or self._kept[0] is not weights:
            self._kept = None
            given = zip(weights.shapes, weights.words, weights.scales, strict=True)
            self._kept = weights, [self._humming.layer(*parts) for parts in given]
        return self._kept[1]

    def _configs(self, work: LayerWork, layers: list[Any], gemm: str) -> list[dict[str, Any]]:
        """What a forward of each layer is told; the true number of rows is known here, where vLLM estimates it."""
        return [
            {
                "valid_shape_m": work.pairs,
                "compute_config": {"gemm_type": gemm},
                "tuning_config": self._humming.configure(layer.humming_config, shape_m=work.pairs, gemm_type=gemm),
            }
            for layer in layers
        ]

    def _route(self, work: LayerWork) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids) [M, 8], in memory of torch's allocator, as vLLM has it."""
        found: tuple[torch.Tensor, torch.Tensor] = self._ops.grouped_topk(
            work.logits, 1, 1, TOP_K, True, 1.0, work.bias, _SIGMOID
        )
        return found

    def _indexed(self, work: LayerWork, layers: list[Any]) -> Chain:
        up, down = layers
        buffers = _buffers(work, layers)
        up_options, down_options = self._configs(work, layers, "indexed")
        blocks = [options["tuning_config"]["block_shape"][0] for options in (up_options, down_options)]
        plans = {block: _empty_plan(work, block) for block in blocks}

        def call() -> None:
            weights, ids = self._route(work)
            for block, plan in plans.items():  # one of each block size: vLLM aligns again where the two differ
                self._ops.moe_align_block_size(ids, work.logits.shape[1], block, *plan, work.expert_map, None)
            first, second = (
                dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), plans[block], strict=True))
                for block in blocks
            )
            up(work.x, outputs=buffers.gate_up, top_k=TOP_K, **first, **up_options)
            self._humming.activate(up, buffers.gate_up, buffers.hidden)
            down(buffers.hidden, outputs=buffers.routed, top_k=1, **second, **down_options)
            experts, here = work.logits.shape[1], work.expert_map
            combine_rows(buffers.routed, buffers.out, weights, ids, num_experts=experts, expert_map=here)

        return Chain(call, buffers.out)

    def _grouped(self, work: LayerWork, layers: list[Any]) -> Chain:
        up, down = layers
        buffers = _buffers(work, layers)
        up_options, down_options = self._configs(work, layers, "grouped_contiguous")
        tokens, experts, device = work.x.shape[0], work.logits.shape[1], work.x.device
        offsets = torch.empty(up.num_experts + 1, dtype=torch.int64, device=device)
        numbers = torch.arange(work.pairs, dtype=torch.int32, device=device).view(tokens, TOP_K)
        places, *scratch = (torch.empty_like(numbers) for _ in range(4))
        room = torch.empty(
            self._ops.moe_permute_sort_workspace_size(work.pairs, experts), dtype=torch.int8, device=device
        )
        permuted = torch.empty(work.pairs, work.x.shape[1], dtype=torch.bfloat16, device=device)
        extent = offsets[-1:]

        def call() -> None:
            weights, ids = self._route(work)
            self._ops.moe_prepare_scatter(
                ids, numbers, work.expert_map, experts, up.num_experts, offsets, places, room, *scratch
            )
            self._humming.scatter(up, work.x, permuted, scatter_idx=places, num_valid_tokens=extent)
            up(permuted, outputs=buffers.gate_up, expert_layout=offsets, **up_options)
            self._humming.activate(down, buffers.gate_up, buffers.hidden, num_valid_tokens=extent)
            down(buffers.hidden, outputs=buffers.routed, expert_layout=offsets, **down_options)
            rows = buffers.routed.view(tokens, TOP_K, buffers.routed.shape[1])
            self._ops.moe_unpermute(rows, weights, places.view(-1), offsets, TOP_K, buffers.out)

        return Chain(call, buffers.out)


class _Buffers(NamedTuple):
    gate_up: torch.Tensor
    hidden: torch.Tensor
    routed: torch.Tensor
    out: torch.Tensor


def _buffers(work: LayerWork, layers: list[Any]) -> _Buffers:
    up, down = layers
    sizes = (
        (work.pairs, up.shape_n),
        (work.pairs, down.shape_k),
        (work.pairs, down.shape_n),
        (work.x.shape[0], down.shape_n),
    )
    return _Buffers(*(torch.empty(size, dtype=torch.bfloat16, device=work.x.device) for size in sizes))


def _empty_plan(work: LayerWork, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for vLLM's plan, as large as vLLM makes it."""
    experts = work.logits.shape[1]
    slots = work.pairs + experts * (block - 1)
    if work.pairs < experts:
        slots = min(work.pairs * block, slots)
    sizes = (slots, -(-slots // block), 1)
    slot_ids, expert_ids, extent = (torch.empty(size, dtype=torch.int32, device=work.x.device) for size in sizes)
    return slot_ids, expert_ids, extent
