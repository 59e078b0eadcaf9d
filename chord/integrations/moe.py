"""The experts of a MoE layer over memory that a framework lends: no allocation, no synchronisation, no host reads.

Three ways to give the rows: by a plan that is made here (indexed), sorted by expert (contiguous), or a slab for each
expert (masked). Each is two launches, the SwiGLU being part of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from chord import _runtime
from chord.router import RoutePlan, launch, max_route_blocks, route_plan
from chord.w4a16 import PackedW4A16, WeightShape, moe_w4a16, moe_w4a16_combine, moe_w4a16_contiguous, moe_w4a16_masked
from chord.w4a16.launch import GEMMS

BLOCK_M = 8
"""The kernels join blocks of one expert themselves, so that the smallest wastes least."""
BOUNDARY_BYTES = 256

INDEXED = ("moe_w4a16", "route_plan", "moe_w4a16_combine")
"""The operators of a layer whose rows are found through a plan, as `preload` takes them."""
CONTIGUOUS = ("moe_w4a16_contiguous", "moe_scatter", "moe_combine")
"""Those of a layer whose rows are copied into the order of experts."""
MASKED = ("moe_w4a16_masked",)
"""Those of a layer over a batched dispatcher's slabs, which it fills and combines itself."""

Piece = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor that is cut out of lent memory."""


def bytes_of(pieces: Sequence[Piece]) -> int:
    """Memory that `cut` needs."""
    return sum(_padded_bytes(piece) for piece in pieces)


def cut(memory: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Contiguous tensors out of contiguous memory of any type, each on a 256-byte boundary of it."""
    raw = memory.reshape(-1).view(torch.uint8)
    return list(_cut(raw, pieces))


def _cut(raw: torch.Tensor, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
    start = 0
    for dtype, shape in pieces:
        yield raw[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _padded_bytes((dtype, shape))


def _padded_bytes(piece: Piece) -> int:
    dtype, shape = piece
    return -(-prod(shape) * dtype.itemsize // BOUNDARY_BYTES) * BOUNDARY_BYTES


def routing_pieces(tokens: int, top_k: int) -> list[Piece]:
    """Room for ids and weights that come in another type than the kernels read."""
    return [(torch.int32, (tokens, top_k)), (torch.float32, (tokens, top_k))]


def routing(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, pieces: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ids and float32 weights [M, k], contiguous; copied only where they are not. pieces: `routing_pieces`."""
    found = []
    for given, room in zip((topk_ids, topk_weights), pieces, strict=True):
        fits = given.dtype == room.dtype and given.is_contiguous()
        found.append(given if fits else room.copy_(given))
    return found[0], found[1]


def plan_pieces(tokens: int, top_k: int, experts: int) -> list[Piece]:
    """The tensors of a plan over `experts` local experts, and the scratch memory of the kernel that makes it."""
    blocks = max_route_blocks(tokens, top_k, experts, BLOCK_M)
    sizes = (blocks * BLOCK_M, blocks, 1, experts, experts + 1, experts)
    scratch = launch.plan_workspace_bytes(tokens * top_k)
    return [*((torch.int32, (size,)) for size in sizes), (torch.uint8, (scratch,))]


def make_plan(
    ids: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    num_experts: int,
    num_local_experts: int,
    expert_map: torch.Tensor | None,
) -> RoutePlan:
    """The plan of int32 ids [M, k], where those outside 0..num_experts-1 and of experts elsewhere count for nothing.

    pieces: cut as `plan_pieces` says. expert_map: int32 [num_experts], local id or -1.
    """
    *buffers, scratch = pieces
    plan = RoutePlan(*buffers)
    if ids.is_cuda:  # the operator would take its scratch memory from torch's allocator
        launch.route_plan(ids, num_experts, BLOCK_M, expert_map, plan, scratch)
        return plan
    local = None if expert_map is None else num_local_experts
    return route_plan(ids, num_experts, BLOCK_M, local_experts=expert_map, num_local_experts=local, plan=plan)


def indexed(
    x: torch.Tensor,
    w13: PackedW4A16,
    w2: PackedW4A16,
    plan: RoutePlan,
    weights: torch.Tensor,
    ids: torch.Tensor,
    hidden: torch.Tensor,
    routed: torch.Tensor,
    out: torch.Tensor,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None,
    expected_rows: int,
    invariant: bool,
) -> None:
    """out[t] = sum over j of weights[t, j] * (w2 @ swiglu(w13 @ x[t])), w13 and w2 of expert ids[t, j]; 0 without one.

    x, out: [M, H]. plan, num_experts, expert_map: as `make_plan` made it of ids [M, k]. hidden: [M * k, I] and routed:
    [M * k, H], scratch. All bfloat16 but weights and ids, as `routing` gives them. out may lie over hidden.
    """
    options = {"block_m": BLOCK_M, "expected_rows": expected_rows, "invariant": invariant}
    moe_w4a16(x, w13, plan, top_k=ids.shape[1], swiglu=True, out=hidden, **options)  # type: ignore[arg-type]
    options |= {"num_experts": num_experts, "local_experts": expert_map}  # type: ignore[dict-item]
    moe_w4a16_combine(hidden, w2, plan, weights, ids, routed=routed, out=out, **options)  # type: ignore[arg-type]


def contiguous(
    rows: torch.Tensor,
    w13: PackedW4A16,
    w2: PackedW4A16,
    offsets: torch.Tensor,
    hidden: torch.Tensor,
    routed: torch.Tensor,
    *,
    expected_rows: int,
    invariant: bool,
) -> None:
    """routed[row] = w2 @ swiglu(w13 @ rows[row]), rows sorted by expert as offsets [E + 1] tell; later ones stay."""
    options = {"offsets": offsets, "expected_rows": expected_rows, "invariant": invariant}
    moe_w4a16_contiguous(rows, w13, swiglu=True, out=hidden, **options)  # type: ignore[arg-type]
    moe_w4a16_contiguous(hidden, w2, out=routed, **options)  # type: ignore[arg-type]


def masked(
    slabs: torch.Tensor,
    w13: PackedW4A16,
    w2: PackedW4A16,
    counts: torch.Tensor,
    hidden: torch.Tensor,
    routed: torch.Tensor,
    *,
    expected_rows: int,
    invariant: bool,
) -> None:
    """routed[e, i] = w2 @ swiglu(w13 @ slabs[e, i]) for i < counts[e]; slabs [E, T, H], counts int32 [E]."""
    moe_w4a16_masked(slabs, w13, counts, expected_rows=expected_rows, invariant=invariant, swiglu=True, out=hidden)
    moe_w4a16_masked(hidden, w2, counts, expected_rows=expected_rows, invariant=invariant, out=routed)


def preload(device: torch.device, shapes: Sequence[WeightShape], operators: Sequence[str]) -> list[str]:
    """Loads every program that any number of rows can select for these projections, of the named operators alone.

    operators: INDEXED, CONTIGUOUS, MASKED, or others that a host calls. Returns the programs' names; nothing on a CPU.
    Afterwards a forward loads nothing, so that it may be captured at once. Raises chord's errors, such as
    VerificationError, NoProgramError and UnsupportedDeviceError.
    """
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    registry, found = _runtime.registry(), set[str]()
    for operator in operators:
        for ranges in _problems(operator, shapes):
            found.update(registry.preload(operator, ranges, index))
    return sorted(found)


def _problems(operator: str, shapes: Sequence[WeightShape]) -> list[dict[str, int]]:
    """What a layer asks of an operator, whatever the number of rows."""
    if operator in GEMMS:
        return [{"n": shape.n, "k": shape.k, "experts": shape.experts} for shape in shapes]
    return [{"block_m": BLOCK_M} if operator == "route_plan" else {}]
