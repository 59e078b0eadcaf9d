"""Checks of the grouped W4A16 GEMMs: sorted rows and slabs with everything that may lie between and behind them.

The bar is that of chord.checks.w4a16. Rows that are nobody's hold NaN in x and poison in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from chord.checks.w4a16 import Expected, problems_of, weights_of
from chord.w4a16 import grouped_ops, launch
from chord.w4a16.grouped_ops import Settings
from chord.w4a16.grouped_rows import SEGMENT, ContiguousRows, GroupedRows, MaskedRows
from chord.w4a16.layout import WeightShape
from chord.w4a16.weights import PackedW4A16

FORMS = {
    "offsets": launch.CONTIGUOUS,
    "wide_offsets": launch.CONTIGUOUS,
    "m_indices": launch.CONTIGUOUS,
    "masked": launch.MASKED,
}
"""How rows are told, with the operator that takes them so."""
SPREADS = ("ragged", "full", "hot", "mostly_empty", "one", "none")
_SPARE_ROWS = 5  # behind the last expert's rows, or behind the fullest slab's


class GroupedCase(NamedTuple):
    """One call's inputs, and whose row each row of x is (-1: nobody's), numbered through slabs."""

    x: torch.Tensor
    words: torch.Tensor
    scales: torch.Tensor
    packed: PackedW4A16
    rows: GroupedRows
    settings: Settings
    expert_of: torch.Tensor

    @property
    def columns(self) -> int:
        return self.packed.shape.outputs(self.settings.swiglu)


def draw_counts(spread: str, mean: int, experts: int, seed: int = 0) -> list[int]:
    """Rows of each expert. full: all have `mean`, which fills slabs to their end."""
    generator = torch.Generator().manual_seed(seed + mean + experts)
    counts = torch.randint(0, 2 * mean + 1, (experts,), generator=generator)
    if spread == "full":
        counts = torch.full_like(counts, mean)
    elif spread == "hot":
        counts = torch.where(torch.arange(experts) == experts // 2, 8 * mean + 3, counts // 8)
    elif spread == "mostly_empty":
        counts = torch.where(torch.arange(experts) % 5 == 3, counts, 0)
    elif spread in ("one", "none"):
        counts = torch.where(torch.arange(experts) == experts - 1, spread == "one", 0)
    return [int(count) for count in counts]


def grouped_case(
    shape: WeightShape,
    form: str,
    counts: list[int],
    device: torch.device,
    *,
    weighted: bool = False,
    swiglu: bool = False,
    spare_rows: int = _SPARE_ROWS,
    seed: int = 0,
) -> GroupedCase:
    """Random rows, so many of each expert. spare_rows: nobody's, behind sorted rows and at the end of each slab."""
    words, scales, packed = weights_of(shape, device, seed)
    if form == "masked":
        each = max(counts) + spare_rows
        owners = [e if place < count else -1 for e, count in enumerate(counts) for place in range(each)]
        size: tuple[int, ...] = (shape.experts, each)
    else:
        fill = SEGMENT if form == "m_indices" else 1
        owners = [owner for e, count in enumerate(counts) for owner in [e] * count + [-1] * (-count % fill)]
        owners += [-1] * spare_rows
        size = (len(owners),)
    expert_of = torch.tensor(owners, dtype=torch.int64)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    x = torch.randn(len(owners), shape.k, generator=generator, device=device).to(torch.bfloat16)
    x[(expert_of < 0).to(device)] = float("nan")
    weight = torch.rand(len(owners), generator=generator, device=device) if weighted else None
    settings = Settings(None if weight is None else weight.view(size), shape.gated, swiglu, 0, False, False)
    told = rows_of(form, counts, expert_of, device)
    return GroupedCase(x.view(*size, shape.k), words, scales, packed, told, settings, expert_of)


def rows_of(form: str, counts: list[int], expert_of: torch.Tensor, device: torch.device) -> GroupedRows:
    """What tells the operator whose rows are whose."""
    if form == "masked":
        return MaskedRows(torch.tensor(counts, dtype=torch.int32, device=device))
    if form == "m_indices":
        return ContiguousRows(None, expert_of.to(device, torch.int32))
    sums = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0))
    return ContiguousRows(sums.to(device, torch.int64 if form == "wide_offsets" else torch.int32), None)


def placed(case: GroupedCase, device: torch.device) -> GroupedCase:
    """The case with everything that a program reads on a device; copies alone, no kernels."""
    if case.x.device == device:
        return case
    weight = case.settings.row_weight
    rows: GroupedRows
    if isinstance(case.rows, MaskedRows):
        rows = MaskedRows(case.rows.counts.to(device))
    else:
        told = (case.rows.offsets, case.rows.m_indices)
        rows = ContiguousRows(*(None if tensor is None else tensor.to(device) for tensor in told))
    return case._replace(
        x=case.x.to(device),
        packed=case.packed.to(device),
        rows=rows,
        settings=case.settings._replace(row_weight=None if weight is None else weight.to(device)),
    )


def run_program(case: GroupedCase, program: str, out: torch.Tensor) -> None:
    """Launches one program on a case's inputs, whatever the routes say. out: [rows, columns]."""
    shape = case.packed.shape
    if out.numel():
        values = grouped_ops.gemm_values(case.x, case.packed.data, case.rows, out, shape, case.settings)
        launch.launch(case.rows.operator, values, case.x.device.index, shape, 0, False, program)


def expected_of(case: GroupedCase) -> Expected:
    """A case's exact result and the plain reference's error, where the case lies."""
    weight = case.settings.row_weight
    return Expected.of_rows(
        case.x.view(-1, case.packed.shape.k),
        case.words,
        case.scales,
        case.expert_of,
        None if weight is None else weight.view(-1),
        top_k=1,
        swiglu=case.settings.swiglu,
    )


def grouped_problems(case: GroupedCase, expected: Expected, program: str) -> Iterator[str]:
    """What is wrong with a program on a case, judged where `expected` lies; nothing for a pass."""
    return problems_of(case, expected, program, lambda out: run_program(case, program, out))
