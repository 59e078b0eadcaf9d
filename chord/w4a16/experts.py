"""The routed experts of a MoE layer as a torch module over packed weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from chord import _runtime
from chord.router.api import route_plan
from chord.router.plan import device_of
from chord.router.validate import MAX_EXPERTS, check_devices, check_int, check_tensor
from chord.w4a16.api import Plan, moe_w4a16
from chord.w4a16.checkpoint import ExpertReader, Part, Shard
from chord.w4a16.combine import moe_w4a16_combine
from chord.w4a16.grouped import moe_w4a16_contiguous, moe_w4a16_masked
from chord.w4a16.layout import LAYOUT_VERSION, SCALE_GROUP, WeightShape
from chord.w4a16.profiles import TP_SIZE, Profile, Role, check_names, select_profile
from chord.w4a16.weights import PackedW4A16, pack_expert


class W4A16Experts(torch.nn.Module):
    """y[t] = sum over t's routes of weight * w2[e] @ (silu(gate) * up), where [gate | up] = w13[e] @ x[t].

    The packed weights are buffers, so that `to`, `state_dict` and `load_state_dict` work on them; the layout's version
    is part of the state and another one is refused. `profile` names the kind of deployment. Inference only.
    """

    w13: torch.Tensor
    w2: torch.Tensor

    def __init__(
        self,
        w13: PackedW4A16,
        w2: PackedW4A16,
        *,
        local_experts: range | None = None,
        num_global_experts: int | None = None,
        profile: str = "auto",
        role: Role | None = None,
        tensor_parallel_size: int | None = None,
    ) -> None:
        """w13: [E, 2 I, H] packed with gated=True. w2: [E, H, I].

        local_experts: the global ids of these E experts, out of num_global_experts, on an expert-parallel rank.
        profile, role, tensor_parallel_size: see `chord.w4a16.profiles.select_profile`; they choose no kernel.
        Raises TypeError or ValueError for projections that do not belong together.
        """
        super().__init__()
        _check_projections(w13, w2)
        experts = w13.shape.experts
        self.num_global_experts = experts if num_global_experts is None else num_global_experts
        check_int("num_global_experts", self.num_global_experts, 1, MAX_EXPERTS)
        self.local_experts = _checked_local(local_experts, self.num_global_experts)
        if len(self.local_experts) != experts:
            raise ValueError(
                f"local_experts, num_global_experts: expected the ids of {experts} experts, got {self.local_experts}"
            )
        self.w13_shape, self.w2_shape = w13.shape, w2.shape
        self.layout_version = LAYOUT_VERSION  # stays with a module that is saved as a whole
        self.register_buffer("w13", w13.data)
        self.register_buffer("w2", w2.data)
        arch = _runtime.architecture(w13.device.index) if w13.device.type == "cuda" else None
        self.profile: Profile = select_profile(
            w13.shape, arch, profile=profile, role=role, tensor_parallel_size=tensor_parallel_size
        )

    @classmethod
    def from_safetensors(
        cls,
        path: Path | str,
        prefix: str,
        *,
        device: torch.device | str = "cuda",
        local_experts: range | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        profile: str = "auto",
        role: Role | None = None,
    ) -> W4A16Experts:
        """Reads and packs one layer's experts from safetensors, expert by expert.

        path: a checkpoint's folder, or one file. prefix: what comes before the expert's number in the tensors' names,
        such as "model.layers.1.mlp.experts". `chord.w4a16.checkpoint` tells the forms that are understood.
        local_experts: global ids to load, for expert parallelism; default all. tp_rank, tp_size: which share of the
        intermediate features to load, for tensor parallelism: the sum over ranks is then the caller's.
        Needs safetensors. Raises ValueError, naming tensor or field and value, for what the kernels do not serve: other
        group sizes, zero points, act order, types but int32 codes with bfloat16 scales, quantised inputs.
        """
        check_int("tp_rank", tp_rank)
        check_int("tp_size", tp_size)
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a str, got {prefix!r:.80} ({type(prefix).__name__})")
        check_names(profile, role)  # before much is read
        target = device_of(device)
        reader = ExpertReader(path, prefix, Shard(tp_rank, tp_size))
        experts = _checked_local(local_experts, reader.num_experts)
        w13 = _read_packed(f"{prefix}, gate and up", reader.w13, experts, target, gated=True)
        w2 = _read_packed(f"{prefix}, down", reader.w2, experts, target, gated=False)
        return cls(
            w13,
            w2,
            local_experts=experts,
            num_global_experts=reader.num_experts,
            profile=profile,
            role=role,
            tensor_parallel_size=tp_size if tp_size == TP_SIZE else None,  # other shards have no profile of their own
        )

    def forward(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        plan: Plan | None = None,
        *,
        block_m: int = 8,
        invariant: bool = False,
    ) -> torch.Tensor:
        """[M, H] bfloat16 from x [M, H] bfloat16, topk_weights [M, k] float32 and global topk_ids [M, k] int32.

        plan: of these ids over this rank's experts, with blocks of block_m; without it one is made. The result of
        `chord.fused_router` may be passed on: layer(x, *chord.fused_router(...)).
        invariant: as for `chord.moe_w4a16`. Routes whose expert is not here count as zero. A token's rows are summed as
        by `chord.moe_w4a16_combine`: each rounded, then weighted and added in float32 in the order of topk_ids.
        """
        check_tensor("x", x, (torch.bfloat16,), (None, self.w13_shape.k))
        check_tensor("topk_ids", topk_ids, (torch.int32,), (x.shape[0], None))
        top_k = topk_ids.shape[1]
        check_tensor("topk_weights", topk_weights, (torch.float32,), (x.shape[0], top_k))
        if plan is None:
            plan = route_plan(topk_ids, self.num_global_experts, block_m, local_experts=self._local())
        expected_rows = -(-x.shape[0] * top_k // self.num_global_experts)
        w13, w2 = self.packed()
        active = moe_w4a16(
            x,
            w13,
            plan,
            top_k=top_k,
            block_m=block_m,
            expected_rows=expected_rows,
            invariant=invariant,
            swiglu=True,
        )
        return moe_w4a16_combine(
            active,
            w2,
            plan,
            topk_weights,
            topk_ids,
            block_m=block_m,
            num_experts=self.num_global_experts,
            local_experts=self._local(),
            expected_rows=expected_rows,
            invariant=invariant,
        )

    def forward_contiguous(
        self,
        x: torch.Tensor,
        *,
        offsets: torch.Tensor | None = None,
        m_indices: torch.Tensor | None = None,
        row_weight: torch.Tensor | None = None,
        expected_rows: int | None = None,
        invariant: bool = False,
        zero_missing: bool = False,
    ) -> torch.Tensor:
        """[M, H] bfloat16, a result for each row of x [M, H], whose rows lie in the order of this rank's experts.

        For dispatchers that sort rows by expert: prefill, the profile h200_grouped_prefill. Arguments as for
        `chord.moe_w4a16_contiguous`; row_weight scales the results. Adding up a token's rows is the caller's.
        """
        w13, w2 = self.packed()
        active = moe_w4a16_contiguous(
            x,
            w13,
            offsets=offsets,
            m_indices=m_indices,
            expected_rows=expected_rows,
            invariant=invariant,
            swiglu=True,
        )
        return moe_w4a16_contiguous(
            active,
            w2,
            offsets=offsets,
            m_indices=m_indices,
            row_weight=row_weight,
            expected_rows=expected_rows,
            invariant=invariant,
            zero_missing=zero_missing,
        )

    def forward_masked(
        self,
        x: torch.Tensor,
        counts: torch.Tensor,
        *,
        expected_rows: int,
        row_weight: torch.Tensor | None = None,
        invariant: bool = False,
        zero_missing: bool = False,
    ) -> torch.Tensor:
        """[E, T, H] bfloat16, a result for the first counts[e] rows of each slab of x [E, T, H].

        For low-latency dispatchers: decode, the profile h200_grouped_decode. Arguments as for `chord.moe_w4a16_masked`;
        row_weight scales the results. Adding up a token's rows is the caller's.
        """
        w13, w2 = self.packed()
        active = moe_w4a16_masked(x, w13, counts, expected_rows=expected_rows, invariant=invariant, swiglu=True)
        return moe_w4a16_masked(
            active,
            w2,
            counts,
            expected_rows=expected_rows,
            row_weight=row_weight,
            invariant=invariant,
            zero_missing=zero_missing,
        )

    def packed(self) -> tuple[PackedW4A16, PackedW4A16]:
        """(w13, w2) as the operators take them."""
        version = self.layout_version
        return PackedW4A16(self.w13, self.w13_shape, version), PackedW4A16(self.w2, self.w2_shape, version)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([LAYOUT_VERSION])

    def set_extra_state(self, state: torch.Tensor) -> None:
        if int(state) != LAYOUT_VERSION:
            raise ValueError(
                f"layout_version: this chord reads packed weights of version {LAYOUT_VERSION}, the state has "
                f"{int(state)}; pack them again from the checkpoint"
            )

    def extra_repr(self) -> str:
        shape = self.w13_shape
        return (
            f"experts={shape.experts} of {self.num_global_experts}, hidden={shape.k}, intermediate={self.w2_shape.k}, "
            f"profile={self.profile.name}"
        )

    def _local(self) -> range | None:
        everything = self.local_experts == range(self.num_global_experts)
        return None if everything else self.local_experts


def _checked_local(local_experts: object, num_experts: int) -> range:
    """The global ids of a rank's experts; all where they are not given. Raises TypeError or ValueError."""
    if local_experts is None:
        return range(num_experts)
    if not isinstance(local_experts, range):
        raise TypeError(f"local_experts: expected a range, got {local_experts!r:.80} ({type(local_experts).__name__})")
    if not local_experts or min(local_experts) < 0 or max(local_experts) >= num_experts:
        raise ValueError(f"local_experts: expected ids of 0 to {num_experts - 1}, got {local_experts}")
    return local_experts


def _read_packed(
    what: str, read: Callable[[int], Part], experts: range, device: torch.device, *, gated: bool
) -> PackedW4A16:
    """One projection of the experts, read and packed one at a time. Raises ValueError that names the expert."""
    packed: PackedW4A16 | None = None
    for place, expert in enumerate(experts):
        codes, scale = (tensor.to(device) for tensor in read(expert))
        try:
            if packed is None:
                shape = WeightShape(len(experts), codes.shape[0], scale.shape[1] * SCALE_GROUP, gated)
                data = torch.empty(shape.experts, shape.expert_bytes, dtype=torch.uint8, device=device)
                packed = PackedW4A16(data, shape)
            pack_expert(packed, place, codes, scale)
        except ValueError as error:
            raise ValueError(f"{what} of expert {expert}: {error}") from error
    assert packed is not None  # noqa: S101 - a range of experts is not empty
    return packed


def _check_projections(w13: PackedW4A16, w2: PackedW4A16) -> None:
    for name, packed in (("w13", w13), ("w2", w2)):
        if not isinstance(packed, PackedW4A16):
            raise TypeError(f"{name}: expected a chord.PackedW4A16 (see chord.pack_w4a16), got {type(packed).__name__}")
        check_tensor(name, packed.data, (torch.uint8,), (packed.shape.experts, packed.shape.expert_bytes))
    up, down = w13.shape, w2.shape
    if not up.gated or down.gated:
        raise ValueError("w13, w2: expected w13 packed with gated=True, w2 without")
    if (up.experts, up.k, up.n) != (down.experts, down.n, 2 * down.k):
        raise ValueError(
            f"w13, w2: expected [E, 2 I, H] and [E, H, I], got [{up.experts}, {up.n}, {up.k}] and "
            f"[{down.experts}, {down.n}, {down.k}]"
        )
    check_devices({"w13": w13.data, "w2": w2.data})
