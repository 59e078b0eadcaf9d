"""The down projection and the weighted sum of each token's rows in one call, as users make it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chord._runtime import Prepared
from chord.router.experts import resolve_local_experts
from chord.router.validate import MAX_EXPERTS, check_block_m, check_bool, check_int, check_tensor
from chord.w4a16 import combine_launch, combine_ops, reference
from chord.w4a16.api import Plan, PreparedMoeW4A16, blocks_of, check_no_program, check_width, checked_packed
from chord.w4a16.combine_ops import Arguments
from chord.w4a16.validate import check_kinds, check_plan_values
from chord.w4a16.weights import PackedW4A16


def moe_w4a16_combine(
    x: torch.Tensor,
    packed: PackedW4A16,
    plan: Plan,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    block_m: int,
    num_experts: int | None = None,
    local_experts: range | torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    routed: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """out[t] = sum over j of topk_weights[t, j] * bfloat16(weights[topk_ids[t, j]] @ x[t * k + j]), [M, N] bfloat16.

    The sum is in float32, in the order of j, and rounded once; a token without any expert here gets zeros. The result
    has the bits of `chord.moe_w4a16` without row_weight, followed by such a sum, and the same ones in every run.

    x: [M * k, K] bfloat16, a row for each pair; rows of pairs that are not here are not read.
    packed: from `chord.pack_w4a16`, without gates. plan: of these ids over the experts of `packed`, block_m the plan's.
    topk_weights, topk_ids: [M, k] float32 and int32. Ids are global; those outside 0..num_experts-1 and those of
        experts elsewhere count as zero.
    num_experts: experts that the ids name, at most 1024; default those of `packed`, or the length of a map.
    local_experts: which of them `packed` holds, a range or a map, as the plan was given it. Default all.
    expected_rows, invariant: as for `chord.moe_w4a16`.
    routed: [M * k, N] bfloat16, scratch that is overwritten; allocated when it is not given.
    validate: check the plan's values, and that it names the ids' pairs. Reads them back. Without it nothing is read
        back, and a plan of other ids gives wrong results but no access outside the buffers.

    Works in CUDA graphs and torch.compile (without validate). CPU tensors run the plain reference. Not differentiable.
    Raises TypeError or ValueError before any launch for arguments outside this description.
    """
    arguments = _arguments(
        x,
        packed,
        plan,
        topk_weights,
        topk_ids,
        block_m,
        num_experts,
        local_experts,
        expected_rows,
        invariant,
        {"routed": routed, "out": out},
    )
    check_bool("validate", validate)
    if validate:
        _check_values(arguments)
    if out is None and routed is None:
        result: torch.Tensor = torch.ops.chord.moe_w4a16_combine.default(*arguments)
        return result
    routed, out = _outputs(arguments, packed.shape.n, routed, out)
    torch.ops.chord.moe_w4a16_combine_out.default(*arguments, routed, out)
    return out


def prepare_moe_w4a16_combine(
    x: torch.Tensor,
    packed: PackedW4A16,
    plan: Plan,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    block_m: int,
    num_experts: int | None = None,
    local_experts: range | torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    routed: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    program: str | None = None,
) -> PreparedMoeW4A16:
    """Checks, looks up, verifies and loads once; the result launches on the same buffers as often as it is called.

    Arguments as for `chord.moe_w4a16_combine`. `program` names a program of moe_w4a16 to run instead of the routed one
    (for measurements). The result holds scratch of its own, so it must not run on two streams at once.
    """
    arguments = _arguments(
        x,
        packed,
        plan,
        topk_weights,
        topk_ids,
        block_m,
        num_experts,
        local_experts,
        expected_rows,
        invariant,
        {"routed": routed, "out": out},
    )
    shape = combine_ops.check(arguments)
    routed, out = _outputs(arguments, shape.n, routed, out)
    combine_ops.check_outputs(arguments, shape, routed, out)
    if not x.is_cuda:
        check_no_program(program)
        held = routed, out
        return PreparedMoeW4A16(Prepared(lambda: combine_ops.run(arguments, shape, *held), "reference"), out)
    if not topk_ids.numel() or not arguments.expert_ids.numel():
        return PreparedMoeW4A16(Prepared(out.detach().zero_, ""), out)
    return PreparedMoeW4A16(combine_launch.prepare(arguments, shape, routed, out, program), out)


def _outputs(
    arguments: Arguments, columns: int, routed: torch.Tensor | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those that are given, and new ones of `columns`."""
    rows = arguments.topk_ids.shape
    if routed is None:
        routed = arguments.x.new_empty(rows.numel(), columns)
    return routed, arguments.x.new_empty(rows[0], columns) if out is None else out


def _arguments(
    x: torch.Tensor,
    packed: PackedW4A16,
    plan: Plan,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    block_m: int,
    num_experts: int | None,
    local_experts: range | torch.Tensor | None,
    expected_rows: int | None,
    invariant: bool,
    others: Mapping[str, torch.Tensor | None],
) -> Arguments:
    """What the op takes, worked out where it is not given, after checks of what that needs."""
    weights, blocks = checked_packed(packed), blocks_of(plan)
    if weights.shape.gated:
        raise ValueError("packed: expected a projection packed without gates, got one packed with gated=True")
    check_tensor("x", x, (torch.bfloat16,), (None, None))
    check_width(x, weights)
    check_tensor("topk_ids", topk_ids, (torch.int32,), (None, None))
    check_block_m(block_m)
    experts = weights.shape.experts
    if local_experts is not None and not isinstance(local_experts, range):
        check_tensor("local_experts", local_experts, (torch.int32,), (None,))
    if num_experts is None:
        if isinstance(local_experts, range):
            raise ValueError("num_experts: expected how many experts topk_ids name, beside a range of local ones")
        num_experts = experts if local_experts is None else local_experts.shape[0]
    check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    if local_experts is None and num_experts != experts:
        raise ValueError(
            f"local_experts: expected which of {num_experts} experts the {experts} of packed are, got None"
        )
    if isinstance(local_experts, range) and len(local_experts) != experts:
        raise ValueError(f"local_experts: expected {experts}, the experts of packed, got {local_experts}")
    expert_map, _ = resolve_local_experts(local_experts, num_experts, x.device, experts)
    rows = -(-topk_ids.shape[0] * topk_ids.shape[1] // num_experts) if expected_rows is None else expected_rows
    check_kinds({**blocks._asdict(), "topk_weights": topk_weights}, others, {"invariant": invariant}, rows)
    return Arguments(
        x,
        weights.data,
        *blocks,
        topk_weights,
        topk_ids,
        expert_map,
        num_experts,
        block_m,
        rows,
        invariant,
    )


def _check_values(arguments: Arguments) -> None:
    """The plan is one, and gives each pair to the expert that topk_ids and the map say. Reads them back."""
    shape = combine_ops.check(arguments)
    plan, pairs = arguments.plan, arguments.topk_ids.numel()
    block_m, experts = arguments.block_m, shape.experts
    check_plan_values(*plan, block_m=block_m, num_experts=experts, num_pairs=pairs)
    host = (tensor.cpu() for tensor in plan)
    owners = torch.full((pairs,), -1)
    for expert, rows in reference.block_rows(*host, block_m=block_m, num_experts=experts, num_pairs=pairs).items():
        owners[rows] = expert
    wanted = combine_ops.local_ids(arguments).flatten().cpu()
    wrong = owners != wanted
    if wrong.any():
        pair = int(wrong.nonzero()[0])
        said, found = (f"expert {e}" if e >= 0 else "no expert" for e in (int(wanted[pair]), int(owners[pair])))
        raise ValueError(f"plan: expected {said} for pair {pair}, as topk_ids say, got {found}; make it of these ids")
