"""chord's GEMMs as experts of vLLM's modular kernel: one class for each way in which rows come.

Tensor and expert parallel: by a plan (indexed), or for expert parallelism on request sorted by expert (contiguous).
Batched dispatchers such as DeepEP's low-latency one: a slab for each expert (masked). All write into the workspaces
that vLLM lends.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import get_moe_permute_scratch, moe_prepare_scatter
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kInt4Static32
from vllm.platforms import current_platform

from chord import _settings
from chord.integrations import moe
from chord.registry.architectures import BY_CAPABILITY
from chord.w4a16 import PackedW4A16
from chord.w4a16.rows import combine_rows, scatter_rows

Shape = tuple[int, ...]
_ELEMENT_BYTES = 2  # of vLLM's workspaces, which have the type of the activations


class ChordExperts(mk.FusedMoEExpertsModular):
    """What the three have in common. w1 and w2 of `apply` are the packed bytes, [E, bytes] uint8."""

    operators: ClassVar[tuple[str, ...]]
    """All that `apply` launches: their programs are loaded before serving."""

    def __init__(
        self,
        w13: PackedW4A16,
        w2: PackedW4A16,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self._w13, self._w2 = w13, w2
        self._invariant = bool(envs.VLLM_BATCH_INVARIANT)

    @classmethod
    def batched(cls) -> bool:
        return bool(cls.activation_format() == mk.FusedMoEActivationFormat.BatchedExperts)

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        capability = current_platform.get_device_capability()
        return current_platform.is_cuda() and capability is not None and tuple(capability) in BY_CAPABILITY

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return weight_key == kInt4Static32 and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.enable_eplb

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """(experts here, tokens or rows of a slab, N of w13, hidden size, top_k)."""
        shape = self._w13.shape
        return shape.experts, a1.shape[-2], shape.n, shape.k, topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,  # noqa: N803 - vLLM passes these by position under its names
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[Shape, Shape, Shape]:
        """Two flat workspaces, in elements, and the output's shape. The first may be the output's memory, too."""
        first, second = (moe.bytes_of(pieces) // _ELEMENT_BYTES for pieces in self._pieces(M, topk))
        return (first,), (second,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Raises ValueError for router weights on the input; everything else was checked when the layer was made."""
        if apply_router_weight_on_input:
            raise ValueError("--quantization chord does not serve router weights on the input of the experts")
        tokens, top_k = topk_ids.shape
        first, second = self._pieces(hidden_states.shape[-2], top_k)
        self._run(
            output,
            hidden_states.contiguous(),
            topk_weights,
            topk_ids,
            global_num_experts,
            expert_map,
            moe.cut(workspace13, first),
            moe.cut(workspace2, second),
            expert_tokens_meta,
            self._expected_rows(tokens, top_k, global_num_experts),
        )

    def _pieces(self, rows: int, top_k: int) -> tuple[list[moe.Piece], list[moe.Piece]]:
        """What the two workspaces hold for so many tokens, or rows of a slab."""
        raise NotImplementedError

    def _run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        first: list[torch.Tensor],
        second: list[torch.Tensor],
        meta: mk.ExpertTokensMetadata | None,
        expected_rows: int,
    ) -> None:
        raise NotImplementedError

    def _expected_rows(self, tokens: int, top_k: int, num_experts: int) -> int:
        """Rows of an expert on average, as far as the host knows: those of all data-parallel ranks reach it."""
        if is_forward_context_available():
            across = get_forward_context().dp_metadata
            if across is not None:
                tokens = int(across.num_tokens_across_dp_cpu.sum())
        return -(-tokens * top_k // num_experts)

    def _bf16(self, *shape: int) -> moe.Piece:
        return torch.bfloat16, shape


class ChordIndexedExperts(ChordExperts):
    """Rows found through a plan: nothing is copied, whatever share of the experts is here."""

    operators = moe.INDEXED

    def _pieces(self, rows: int, top_k: int) -> tuple[list[moe.Piece], list[moe.Piece]]:
        w2 = self._w2.shape
        routes = [*moe.routing_pieces(rows, top_k), *moe.plan_pieces(rows, top_k, w2.experts)]
        return [self._bf16(rows * top_k, w2.k)], [self._bf16(rows * top_k, w2.n), *routes]

    def _run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        first: list[torch.Tensor],
        second: list[torch.Tensor],
        meta: mk.ExpertTokensMetadata | None,
        expected_rows: int,
    ) -> None:
        (hidden,), (routed, ids_room, weights_room, *plan_pieces) = first, second
        ids, weights = moe.routing(topk_ids, topk_weights, (ids_room, weights_room))
        plan = moe.make_plan(ids, plan_pieces, num_experts, self._w13.shape.experts, expert_map)
        moe.indexed(
            x, self._w13, self._w2, plan, weights, ids, hidden, routed, output,
            num_experts=num_experts, expert_map=expert_map, expected_rows=expected_rows, invariant=self._invariant,
        )  # fmt: skip


class ChordContiguousExperts(ChordExperts):
    """Rows copied into the order of the experts that are here, which vLLM's own operator finds."""

    operators = moe.CONTIGUOUS

    def _pieces(self, rows: int, top_k: int) -> tuple[list[moe.Piece], list[moe.Piece]]:
        w2, pairs = self._w2.shape, rows * top_k
        second = [self._bf16(pairs, w2.k), self._bf16(pairs, w2.n), *moe.routing_pieces(rows, top_k)]
        return [self._bf16(pairs, w2.n)], second

    def _run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        first: list[torch.Tensor],
        second: list[torch.Tensor],
        meta: mk.ExpertTokensMetadata | None,
        expected_rows: int,
    ) -> None:
        (rows,), (hidden, routed, *rooms) = first, second
        ids, weights = moe.routing(topk_ids, topk_weights, rooms)
        experts = self._w13.shape.experts
        scratch = get_moe_permute_scratch(num_experts=num_experts, num_local_experts=experts, device=x.device)
        offsets, places = moe_prepare_scatter(ids, expert_map, scratch)
        limit = offsets[-1:]
        scatter_rows(x, rows, places, limit=limit)
        moe.contiguous(
            rows, self._w13, self._w2, offsets, hidden, routed, expected_rows=expected_rows, invariant=self._invariant
        )
        combine_rows(
            routed, output, weights, ids,
            num_experts=num_experts, expert_map=expert_map, row_ids=places, limit=limit,
        )  # fmt: skip


class ChordMaskedExperts(ChordExperts):
    """Slabs of a batched dispatcher; its finalizer applies the router weights."""

    operators = moe.MASKED

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M: int, *others: Any, **named: Any) -> tuple[Shape, Shape, Shape]:  # noqa: ANN401, N803
        """The output is [E, rows of a slab, H]."""
        w2 = self._w2.shape
        _, second = self._pieces(M, 1)
        return (0,), (moe.bytes_of(second) // _ELEMENT_BYTES,), (w2.experts, M, w2.n)

    def _pieces(self, rows: int, top_k: int) -> tuple[list[moe.Piece], list[moe.Piece]]:
        w2 = self._w2.shape
        return [], [self._bf16(w2.experts, rows, w2.k)]

    def _run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        first: list[torch.Tensor],
        second: list[torch.Tensor],
        meta: mk.ExpertTokensMetadata | None,
        expected_rows: int,
    ) -> None:
        if meta is None or meta.expert_num_tokens is None:
            raise ValueError("expert_tokens_meta: expected the rows of each expert from a batched dispatcher, got none")
        counts = meta.expert_num_tokens
        moe.masked(
            x, self._w13, self._w2, counts, second[0], output, expected_rows=expected_rows, invariant=self._invariant
        )

    def _expected_rows(self, tokens: int, top_k: int, num_experts: int) -> int:
        """Without vLLM's count over the ranks, each dispatcher is taken to send as many tokens as this one."""
        known = is_forward_context_available() and get_forward_context().dp_metadata is not None
        return super()._expected_rows(tokens if known else tokens * (self.num_dispatchers or 1), top_k, num_experts)


def experts_for(config: FusedMoEConfig) -> type[ChordExperts]:
    """The class for a deployment. CHORD_EP_ROWS chooses among the two for expert parallelism."""
    parallel = config.moe_parallel_config
    if parallel.use_batched_activation_format:
        return ChordMaskedExperts
    contiguous = parallel.use_ep and _settings.read().ep_rows == "contiguous"
    return ChordContiguousExperts if contiguous else ChordIndexedExperts
