"""The grouped W4A16 MoE GEMMs as users call them: rows that lie by expert already, so that no plan is needed."""

from __future__ import annotations

import torch

from chord._runtime import Prepared
from chord.router.validate import check_tensor
from chord.w4a16 import grouped_ops, launch
from chord.w4a16.api import ClearedFirst, PreparedMoeW4A16, check_no_program, check_width, checked_packed
from chord.w4a16.grouped_ops import Settings
from chord.w4a16.grouped_rows import ContiguousRows, GroupedRows, MaskedRows
from chord.w4a16.validate import check_kinds, check_swiglu
from chord.w4a16.weights import PackedW4A16


def moe_w4a16_contiguous(
    x: torch.Tensor,
    packed: PackedW4A16,
    *,
    offsets: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """out[row] = row_weight[row] * (weights[expert of row] @ x[row]), [M, N] bfloat16: prefill on sorted rows.

    x: [M, K] bfloat16, rows in the order of their experts. packed: from `chord.pack_w4a16`. Either of:
    offsets: [E + 1] int32 or int64 prefix sums; expert e owns rows offsets[e] to offsets[e + 1] - 1. M may be larger
        than the last: rows beyond it are neither read nor written.
    m_indices: [M] int32, the expert of each row; an expert's rows start on multiples of 128, and -1 marks the rows
        that fill a segment of 128 up. Those are neither read nor written, and cost nothing.
    row_weight: [M] float32, multiplied in float32 before the one rounding of the result.
    expected_rows: rows that an expert has on average, if the host knows better than M / E. It only chooses among
        programs: a wrong value costs time, never correctness.
    invariant: one main loop for all batch sizes, so that a row's bits depend on the row and its expert alone.
    swiglu: of weights packed with gated=True; out[row] = row_weight[row] * silu(gate) * up, [M, N / 2], in float32 up
        to the one rounding. A result has the rows of x in their order: the next projection takes it with the same
        offsets or m_indices.
    zero_missing: clear the output first. Otherwise rows of nobody keep what they held.
    validate: read offsets or m_indices back and raise ValueError if they are wrong. Without it nothing is read back,
        and wrong ones give wrong results but no access outside the buffers.

    Works in CUDA graphs and torch.compile (without validate). CPU tensors run the plain reference. Not differentiable.
    Raises TypeError or ValueError before any launch for arguments outside this description.
    """
    settings = _settings(packed, row_weight, swiglu, _mean(x, packed, expected_rows), invariant, zero_missing)
    _check_kinds({}, {"offsets": offsets, "m_indices": m_indices, "out": out}, settings, validate)
    if validate:
        rows = ContiguousRows(offsets, m_indices)
        rows.check_values(x, grouped_ops.check(x, packed.data, rows, settings))
    arguments = (x, packed.data, offsets, m_indices, *settings)
    if out is None:
        result: torch.Tensor = torch.ops.chord.moe_w4a16_contiguous.default(*arguments)
        return result
    torch.ops.chord.moe_w4a16_contiguous_out.default(*arguments, out)
    return out


def moe_w4a16_masked(
    x: torch.Tensor,
    packed: PackedW4A16,
    counts: torch.Tensor,
    *,
    expected_rows: int,
    row_weight: torch.Tensor | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """out[e, i] = row_weight[e, i] * (weights[e] @ x[e, i]) for i < counts[e], [E, T, N] bfloat16: decode in slabs.

    x: [E, T, K] bfloat16, any T: only the counts cost time. counts: [E] int32 on x's device. Rows at and beyond a
    count are neither read nor written. expected_rows: rows that an expert has on average, about; it only chooses among
    programs. row_weight: [E, T] float32. The other arguments, and what holds besides, are those of
    `chord.moe_w4a16_contiguous`; validate names a count outside 0 to T.
    """
    settings = _settings(packed, row_weight, swiglu, expected_rows, invariant, zero_missing)
    check_tensor("x", x, (torch.bfloat16,), (None, None, None))
    check_width(x, packed)
    _check_kinds({"counts": counts}, {"out": out}, settings, validate)
    if validate:
        rows = MaskedRows(counts)
        rows.check_values(x, grouped_ops.check(x, packed.data, rows, settings))
    arguments = (x, packed.data, counts, *settings)
    if out is None:
        result: torch.Tensor = torch.ops.chord.moe_w4a16_masked.default(*arguments)
        return result
    torch.ops.chord.moe_w4a16_masked_out.default(*arguments, out)
    return out


def prepare_moe_w4a16_contiguous(
    x: torch.Tensor,
    packed: PackedW4A16,
    *,
    offsets: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    expected_rows: int | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    program: str | None = None,
) -> PreparedMoeW4A16:
    """Checks, looks up, verifies and loads once; the result launches on the same buffers as often as it is called.

    Arguments as for `chord.moe_w4a16_contiguous`. `program` names a program to run instead of the routed one (for
    measurements).
    """
    settings = _settings(packed, row_weight, swiglu, _mean(x, packed, expected_rows), invariant, zero_missing)
    _check_kinds({}, {"offsets": offsets, "m_indices": m_indices, "out": out}, settings)
    return _prepare(x, packed, ContiguousRows(offsets, m_indices), settings, out, program)


def prepare_moe_w4a16_masked(
    x: torch.Tensor,
    packed: PackedW4A16,
    counts: torch.Tensor,
    *,
    expected_rows: int,
    row_weight: torch.Tensor | None = None,
    invariant: bool = False,
    zero_missing: bool = False,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    program: str | None = None,
) -> PreparedMoeW4A16:
    """As `chord.prepare_moe_w4a16_contiguous`, with the arguments of `chord.moe_w4a16_masked`."""
    settings = _settings(packed, row_weight, swiglu, expected_rows, invariant, zero_missing)
    check_tensor("x", x, (torch.bfloat16,), (None, None, None))
    check_width(x, packed)
    _check_kinds({"counts": counts}, {"out": out}, settings)
    return _prepare(x, packed, MaskedRows(counts), settings, out, program)


def _prepare(
    x: torch.Tensor,
    packed: PackedW4A16,
    rows: GroupedRows,
    settings: Settings,
    out: torch.Tensor | None,
    program: str | None,
) -> PreparedMoeW4A16:
    data = packed.data
    shape = grouped_ops.check(x, data, rows, settings)
    if out is None:
        out = grouped_ops.new_output(x, shape, settings.swiglu)
    grouped_ops.check_out(out, x, shape, settings.swiglu)
    grouped_ops.check_buffers(x, data, rows, settings, out)
    if not x.is_cuda:
        check_no_program(program)
        written = out
        return PreparedMoeW4A16(
            Prepared(lambda: grouped_ops.run(x, data, rows, written, shape, settings), "reference"), out
        )
    if out.numel():
        values = grouped_ops.gemm_values(x, data, rows, out, shape, settings)
        prepared = launch.prepare(
            rows.operator, values, x.device.index, shape, settings.expert_rows, settings.invariant, program,
            (x, data, rows, settings.row_weight, out),
        )  # fmt: skip
    else:
        prepared = Prepared(lambda: None, "")
    if settings.zero_missing:
        prepared = prepared._replace(launch=ClearedFirst(out, prepared.launch))
    return PreparedMoeW4A16(prepared, out)


def _settings(
    packed: object,
    row_weight: torch.Tensor | None,
    swiglu: bool,
    expected_rows: int,
    invariant: bool,
    zero_missing: bool,
) -> Settings:
    """The op's settings, after checks of what its schema would take for something else."""
    packed = checked_packed(packed)
    check_swiglu(swiglu, packed.shape.gated)
    return Settings(row_weight, packed.shape.gated, swiglu, expected_rows, invariant, zero_missing)


def _check_kinds(
    tensors: dict[str, object], optional: dict[str, object], settings: Settings, validate: object = False
) -> None:
    flags = {"invariant": settings.invariant, "zero_missing": settings.zero_missing, "validate": validate}
    check_kinds(tensors, {"row_weight": settings.row_weight, **optional}, flags, settings.expert_rows)


def _mean(x: object, packed: object, expected_rows: int | None) -> int:
    """expected_rows, worked out where it is not given."""
    weights = checked_packed(packed)
    check_tensor("x", x, (torch.bfloat16,), (None, None))
    assert isinstance(x, torch.Tensor)  # noqa: S101 - check_tensor said so
    check_width(x, weights)
    return -(-x.shape[0] // weights.shape.experts) if expected_rows is None else expected_rows
