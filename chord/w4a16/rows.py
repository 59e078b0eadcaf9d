"""Rows of bfloat16 on their way into and out of the GEMMs: kernels for CUDA tensors, torch for others.

For hosts that bring their own order of rows. Each function writes an output that is given; what it does not name keeps
what it held. `limit` is one int32 or int64 on the device: sorted rows at and beyond it do not exist.
Row ids and `limit` are contents of device memory, which nobody reads back. Whatever they say, an id outside the rows
of the sorted side names nothing: wrong ones give wrong rows, never an access outside the tensors.
"""

from __future__ import annotations

import torch

from chord.router.validate import check_dense, check_devices, check_int, check_memory, check_tensor
from chord.w4a16 import launch

WARP_COLUMNS = 256
COLUMN_STEP = 8
MAX_ROWS = (1 << 31) - 1
"""Most rows, or pairs of a token and a route: the kernels count them in 32 bits."""


def swiglu_rows(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    *,
    row_ids: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """out[row_ids[r]] = silu(gate_up[r, :I]) * gate_up[r, I:], in float32 up to the one rounding.

    gate_up: [R, 2 I], out: [R, I]; bfloat16. row_ids: int32 [R], distinct, default r; a negative one, one at or beyond
    `limit` and one at or beyond R leave their row out. counts: int32 [E], where R rows are E slabs: of slab e the first
    counts[e] exist. R is below 2^31.
    Raises TypeError or ValueError for anything else.
    """
    out, rows, width = _sizes("gate_up", gate_up, out, 2)
    check_int("gate_up (rows)", rows, 0, MAX_ROWS)
    if row_ids is not None:
        check_tensor("row_ids", row_ids, (torch.int32,), (rows,))
    if counts is not None:
        check_tensor("counts", counts, (torch.int32,), (None,))
    _check(out, {"gate_up": gate_up, "row_ids": row_ids, "limit": limit, "counts": counts})
    slab = 1
    if counts is not None:
        if counts.numel() == 0 or rows % counts.numel():
            raise ValueError(f"counts: expected one for each of equal slabs of {rows} rows, got {counts.numel()}")
        slab = rows // counts.numel()
    if gate_up.is_cuda:
        pointers = {"x": gate_up, "out": out, "row_ids": row_ids, "limit": limit, "counts": counts}
        _launch("moe_swiglu", pointers, rows, width, limit, num_sorted=rows, slab_rows=slab)
        return
    to = torch.arange(rows) if row_ids is None else row_ids.long()
    exists = (to >= 0) & (to < _limit_of(limit, rows))
    if counts is not None:
        exists &= torch.arange(rows) % slab < counts.repeat_interleave(slab)
    gate, up = gate_up[exists].float().chunk(2, dim=1)
    out[to[exists]] = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)


def scatter_rows(
    x: torch.Tensor, out: torch.Tensor, row_ids: torch.Tensor, *, limit: torch.Tensor | None = None
) -> None:
    """out[row_ids[t, j]] = x[t] for row ids from 0 to limit - 1.

    x: [M, H], out: [R, H]; bfloat16. row_ids: int32 [M, k], distinct; a negative one, one at or beyond `limit` and one
    at or beyond R are left out. M * k is below 2^31.
    Raises TypeError or ValueError for anything else.
    """
    out, _, width = _sizes("out", out, out, 1)
    check_tensor("x", x, (torch.bfloat16,), (None, width))
    check_tensor("row_ids", row_ids, (torch.int32,), (x.shape[0], None))
    check_int("row_ids (pairs)", row_ids.numel(), 0, MAX_ROWS)
    _check(out, {"x": x, "row_ids": row_ids, "limit": limit})
    pairs, top_k = row_ids.numel(), row_ids.shape[1]
    if x.is_cuda:
        pointers = {"x": x, "out": out, "row_ids": row_ids, "limit": limit}
        _launch("moe_scatter", pointers, pairs, width, limit, num_sorted=out.shape[0], top_k=top_k)
        return
    to = row_ids.reshape(-1).long()
    exists = (to >= 0) & (to < _limit_of(limit, out.shape[0]))
    out[to[exists]] = x.repeat_interleave(top_k, dim=0)[exists]


def combine_rows(
    rows: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
) -> None:
    """out[t] = sum over j of weights[t, j] * rows[row of (t, j)], in float32 and in the order of j; 0 without any.

    rows: [R, H], out: [M, H]; bfloat16. weights: float32 [M, k]. topk_ids: int32 [M, k], global: routes with an id
    outside 0..num_experts-1, and those that expert_map (int32 [num_experts]) gives a negative local id, do not count;
    their rows are not read. row_ids: int32 [M, k], default t * k + j; negative ones, those at and beyond `limit` and
    those at and beyond R do not count either. M * k is below 2^31.
    Raises TypeError or ValueError for anything else.
    """
    out, tokens, width = _sizes("out", out, out, 1)
    check_int("num_experts", num_experts, 0, MAX_ROWS)
    check_tensor("topk_ids", topk_ids, (torch.int32,), (tokens, None))
    check_int("out (rows)", tokens, 0, MAX_ROWS)
    check_int("topk_ids (pairs)", topk_ids.numel(), 0, MAX_ROWS)
    check_tensor("weights", weights, (torch.float32,), tuple(topk_ids.shape))
    check_tensor("rows", rows, (torch.bfloat16,), (None, width))
    if expert_map is not None:
        check_tensor("expert_map", expert_map, (torch.int32,), (num_experts,))
    if row_ids is not None:
        check_tensor("row_ids", row_ids, (torch.int32,), tuple(topk_ids.shape))
    elif rows.shape[0] != topk_ids.numel():
        raise ValueError(f"rows: expected one for each of {topk_ids.numel()} pairs, got {rows.shape[0]}")
    tensors = {"weights": weights, "topk_ids": topk_ids, "expert_map": expert_map, "row_ids": row_ids, "limit": limit}
    _check(out, {"rows": rows, **tensors})
    top_k = topk_ids.shape[1]
    if out.is_cuda:
        pointers = {"x": rows, "out": out, **tensors}
        scalars = {"num_sorted": rows.shape[0], "top_k": top_k, "num_experts": num_experts}
        _launch("moe_combine", pointers, tokens, width, limit, **scalars)
        return
    if not rows.shape[0] or not num_experts:  # nothing that an id could name
        out.zero_()
        return
    counted = (topk_ids >= 0) & (topk_ids < num_experts)
    if expert_map is not None:
        counted &= expert_map[topk_ids.clamp(0, num_experts - 1).long()] >= 0
    places = torch.arange(topk_ids.numel()).view_as(topk_ids) if row_ids is None else row_ids.long()
    counted &= (places >= 0) & (places < _limit_of(limit, rows.shape[0]))
    found = rows[places.clamp(0, rows.shape[0] - 1)].float() * weights.unsqueeze(-1)
    out.copy_(torch.where(counted.unsqueeze(-1), found, 0.0).sum(dim=1))


def _sizes(name: str, rows: torch.Tensor, out: torch.Tensor, ratio: int) -> tuple[torch.Tensor, int, int]:
    """(out, as one to write, its rows, its columns), after checks of both; `name` is what the caller calls `rows`."""
    check_tensor("out", out, (torch.bfloat16,), (None, None))
    width = out.shape[1]
    check_tensor(name, rows, (torch.bfloat16,), (out.shape[0], ratio * width))
    if width == 0 or width % COLUMN_STEP:
        raise ValueError(f"out: expected a positive multiple of {COLUMN_STEP} columns, got {width}")
    return out.detach(), out.shape[0], width


def _check(out: torch.Tensor, inputs: dict[str, torch.Tensor | None]) -> None:
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    limit = given.get("limit")
    if limit is not None:
        limit = check_dense("limit", limit)
        check_tensor("limit", limit, (torch.int32, torch.int64), () if limit.dim() == 0 else (1,))
    check_devices({**given, "out": out})
    rows = {name: tensor for name, tensor in given.items() if tensor.dtype == torch.bfloat16}
    check_memory(rows, {"out": out}, {name: tensor for name, tensor in given.items() if name not in rows})


def _launch(
    operator: str,
    tensors: dict[str, torch.Tensor | None],
    rows: int,
    width: int,
    limit: torch.Tensor | None,
    **scalars: int,
) -> None:
    units = rows * -(-width // WARP_COLUMNS)
    if units:
        values = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        values |= {"limit_bytes": 0 if limit is None else limit.element_size(), "width": width, "num_units": units}
        out = tensors["out"]
        assert out is not None  # noqa: S101 - each of the three has one
        launch.move_rows(operator, out.device.index, values | scalars)


def _limit_of(limit: torch.Tensor | None, rows: int) -> int:
    return rows if limit is None else min(int(limit), rows)
