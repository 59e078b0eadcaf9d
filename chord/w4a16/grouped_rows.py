"""How the grouped W4A16 operators are told which rows belong to which expert, and everything that depends on it.

A source checks itself, says what it means in plain torch, and turns itself into a kernel's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from chord.router.validate import check_devices, check_int, check_tensor
from chord.w4a16 import launch
from chord.w4a16.layout import WeightShape
from chord.w4a16.validate import MAX_PAIRS, refuse, shape_of

SEGMENT = 128
"""Rows of a segment of m_indices: an expert's rows start on such a border."""


@dataclass(frozen=True, eq=False)
class ContiguousRows:
    """Rows [M, K] in the order of their experts, told by prefix sums or by an index for each row; one of the two.

    offsets: int32 or int64 [E + 1]; expert e owns rows offsets[e] to offsets[e + 1] - 1. m_indices: int32 [M]; segments
    of SEGMENT rows belong to one expert each, its rows first, then rows of -1 that belong to nobody.
    """

    operator: ClassVar[str] = launch.CONTIGUOUS

    offsets: torch.Tensor | None
    m_indices: torch.Tensor | None

    @property
    def told_by(self) -> torch.Tensor:
        given = self.m_indices if self.offsets is None else self.offsets
        assert given is not None  # noqa: S101 - check said so
        return given

    def check(self, x: torch.Tensor, packed: torch.Tensor, gated: bool) -> WeightShape:
        """Types, shapes and devices; returns the projection's shape. Works on fake tensors."""
        shape = shape_of(x, packed, gated)
        check_int("rows of x", x.shape[0], 0, MAX_PAIRS)
        if (self.offsets is None) == (self.m_indices is None):
            raise ValueError(
                "offsets, m_indices: expected exactly one of the two, got "
                + ("neither" if self.offsets is None else "both")
            )
        if self.offsets is not None:
            check_tensor("offsets", self.offsets, (torch.int32, torch.int64), (shape.experts + 1,))
            check_devices({"x": x, "packed": packed, "offsets": self.offsets})
        elif self.m_indices is not None:
            check_tensor("m_indices", self.m_indices, (torch.int32,), (x.shape[0],))
            check_devices({"x": x, "packed": packed, "m_indices": self.m_indices})
        return shape

    def check_values(self, x: torch.Tensor, shape: WeightShape) -> None:
        """Reads the device data back. Raises ValueError that names the first entry at fault."""
        if self.offsets is not None:
            values, rows = self.offsets.cpu(), x.shape[0]
            refuse("offsets", values[:1], values[:1] != 0, "0 in front")
            refuse("offsets", values[1:], values.diff() < 0, "prefix sums, which do not fall")
            refuse("offsets", values[-1:], values[-1:] > rows, f"at most {rows} (rows of x) at the end")
        elif self.m_indices is not None:
            _check_indices(self.m_indices.cpu(), shape.experts)

    def by_expert(self, x: torch.Tensor, shape: WeightShape) -> dict[int, torch.Tensor]:
        """Rows of each expert that has any, as int64 tensors. Wrong data names no row outside x."""
        if self.offsets is None:
            owners = self.told_by.to(torch.int64)
            return {e: (owners == e).nonzero().flatten() for e in range(shape.experts) if bool((owners == e).any())}
        limits = self.offsets.to(torch.int64).clamp(0, x.shape[0]).tolist()
        return {e: torch.arange(first, last) for e, (first, last) in enumerate(pairwise(limits)) if first < last}

    def values(self, x: torch.Tensor, shape: WeightShape) -> dict[str, int]:
        """The kernel's arguments that tell of rows."""
        offsets, indices = self.offsets, self.m_indices
        return {
            "offsets": 0 if offsets is None else offsets.data_ptr(),
            "m_indices": 0 if indices is None else indices.data_ptr(),
            "num_rows": x.shape[0],
            "wide_offsets": int(offsets is not None and offsets.dtype == torch.int64),
            "num_items": launch.most_items(launch.most_tiles(x.shape[0], shape.experts), shape),
        }


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Rows [E, T, K]: a slab of T for each expert, of which the first counts[e] hold something. counts: int32 [E]."""

    operator: ClassVar[str] = launch.MASKED

    counts: torch.Tensor

    @property
    def told_by(self) -> torch.Tensor:
        return self.counts

    def check(self, x: torch.Tensor, packed: torch.Tensor, gated: bool) -> WeightShape:
        """Types, shapes and devices; returns the projection's shape. Works on fake tensors."""
        check_tensor("x", x, (torch.bfloat16,), (None, None, None))
        shape = shape_of(x.flatten(0, 1), packed, gated)
        check_tensor("x", x, (torch.bfloat16,), (shape.experts, None, shape.k))
        check_int("rows of x (E * T)", x.shape[0] * x.shape[1], 0, MAX_PAIRS)
        check_tensor("counts", self.counts, (torch.int32,), (shape.experts,))
        check_devices({"x": x, "packed": packed, "counts": self.counts})
        return shape

    def check_values(self, x: torch.Tensor, shape: WeightShape) -> None:
        """Reads the counts back. Raises ValueError that names the first at fault."""
        counts, most = self.counts.cpu(), x.shape[1]
        refuse("counts", counts, (counts < 0) | (counts > most), f"0 to {most} (rows of an expert in x)")

    def by_expert(self, x: torch.Tensor, shape: WeightShape) -> dict[int, torch.Tensor]:
        """Rows of each expert that has any, numbered through all slabs. Wrong data names no row outside a slab."""
        each = x.shape[1]
        counts = self.counts.clamp(0, each).tolist()
        return {e: torch.arange(e * each, e * each + count) for e, count in enumerate(counts) if count}

    def values(self, x: torch.Tensor, shape: WeightShape) -> dict[str, int]:
        """The kernel's arguments that tell of rows."""
        tiles = shape.experts * launch.most_tiles(x.shape[1], 1)
        return {
            "counts": self.counts.data_ptr(),
            "rows_each": x.shape[1],
            "num_items": launch.most_items(tiles, shape),
        }


GroupedRows = ContiguousRows | MaskedRows


def _check_indices(indices: torch.Tensor, experts: int) -> None:
    refuse("m_indices", indices, (indices < -1) | (indices >= experts), f"-1 (nobody's row) or 0 to {experts - 1}")
    rows = torch.nn.functional.pad(indices, (0, -indices.numel() % SEGMENT), value=-1).view(-1, SEGMENT)
    filled = rows >= 0
    late = filled[:, 1:] & ~filled[:, :-1]
    refuse("m_indices", rows[:, 1:], late, f"the rows of {SEGMENT} that hold something before those of -1")
    other = filled & (rows != rows[:, :1])
    refuse("m_indices", rows, other, f"one expert in each {SEGMENT} rows")
