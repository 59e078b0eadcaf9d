"""Checks of the W4A16 GEMM: draws, plans with everything that a plan may hold, and comparison with float64.

The bar: the RMS error against a float64 product with exact weights is at most 1.1 times that of the plain reference;
rows that the plan does not name, and memory around the output, keep every bit; the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from chord.w4a16 import launch, reference
from chord.w4a16.api import BlockPlan
from chord.w4a16.layout import CODES_PER_WORD, SCALE_GROUP, WeightShape
from chord.w4a16.weights import PackedW4A16, pack_w4a16

ROUTINGS = ("random", "balanced", "hot", "mostly_empty", "one", "remote")
POISON = 0x7FC1
"""A bfloat16 NaN that no product gives."""
ERROR_RATIO = 1.1

_MARGIN = 8  # poisoned rows before and after the output
_SLACK = 1e-9  # for results that are all but exact


class GemmCase(NamedTuple):
    """One call's inputs, and which expert each pair goes to (-1: none here)."""

    x: torch.Tensor
    words: torch.Tensor
    scales: torch.Tensor
    packed: PackedW4A16
    plan: BlockPlan
    row_weight: torch.Tensor | None
    expert_of: torch.Tensor
    top_k: int
    block_m: int
    swiglu: bool = False

    @property
    def columns(self) -> int:
        return self.packed.shape.outputs(self.swiglu)


def checkpoint(shape: WeightShape, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words int32 [E, N, K / 8] and scales bfloat16 [E, N, K / 32] of about 0.005 to 0.045."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (shape.experts, shape.n)
    words = torch.randint(
        -(1 << 31), 1 << 31, (*size, shape.k // CODES_PER_WORD), generator=generator, device=device, dtype=torch.int64
    )
    scales = torch.rand(*size, shape.k // SCALE_GROUP, generator=generator, device=device) * 0.04 + 0.005
    return words.to(torch.int32), scales.to(torch.bfloat16)


@lru_cache(maxsize=1)  # the largest take seconds to make and are used by many cases in a row
def weights_of(shape: WeightShape, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor, PackedW4A16]:
    """A checkpoint and its packed form."""
    words, scales = checkpoint(shape, device, seed)
    return words, scales, pack_w4a16(words, scales, gated=shape.gated)


def draw_experts(routing: str, pairs: int, experts: int, seed: int = 0) -> torch.Tensor:
    """[pairs] int64 on the CPU: the expert of each pair, -1 for none."""
    generator = torch.Generator().manual_seed(seed + pairs + experts)
    drawn = torch.randint(0, experts, (pairs,), generator=generator)
    lucky = torch.rand(pairs, generator=generator)
    if routing == "balanced":
        return torch.arange(pairs) % experts
    if routing == "hot":
        return torch.where(lucky < 0.85, torch.full_like(drawn, experts // 2), drawn)
    if routing == "mostly_empty":
        return drawn // 5 * 5
    if routing == "one":
        return torch.where(torch.arange(pairs) == pairs // 2, drawn, torch.full_like(drawn, -1))
    if routing == "remote":
        return torch.where(lucky < 0.4, torch.full_like(drawn, -1), drawn)
    return drawn


def plan_of(
    expert_of: torch.Tensor, experts: int, block_m: int, device: torch.device, *, strange: bool = True
) -> BlockPlan:
    """A plan of the given pairs. `strange`: with blocks of no expert between others, and junk behind its extent."""
    pairs, ids, owners = expert_of.numel(), [], []
    for expert in range(experts):
        rows = (expert_of == expert).nonzero().flatten()
        blocks = -(-rows.numel() // block_m)
        if blocks:
            ids.append(torch.nn.functional.pad(rows, (0, blocks * block_m - rows.numel()), value=pairs))
            owners += [expert] * blocks
        if strange and expert % 3 == 0:
            ids.append(torch.arange(block_m) % max(pairs, 1))  # ids that count for nothing in a block of no expert
            owners.append(-1 if expert % 2 else experts + expert)
    count = sum(part.numel() for part in ids)
    if strange:
        ids.append(torch.full((2 * block_m + 8,), 0x11111111))
        owners += [0, -1, experts]
    return BlockPlan(
        torch.cat(ids).to(device, torch.int32) if ids else torch.empty(0, dtype=torch.int32, device=device),
        torch.tensor(owners, dtype=torch.int32, device=device),
        torch.tensor([count], dtype=torch.int32, device=device),
    )


def gemm_case(
    shape: WeightShape,
    tokens: int,
    top_k: int,
    block_m: int,
    routing: str,
    device: torch.device,
    *,
    weighted: bool = False,
    swiglu: bool = False,
    seed: int = 0,
) -> GemmCase:
    """Random inputs; rows of x that no pair reads hold NaN. swiglu: only with a gated shape."""
    words, scales, packed = weights_of(shape, device, seed)
    expert_of = draw_experts(routing, tokens * top_k, shape.experts, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    x = torch.randn(tokens, shape.k, generator=generator, device=device).to(torch.bfloat16)
    read = torch.zeros(tokens, dtype=torch.bool)
    read[(expert_of >= 0).nonzero().flatten() // top_k] = True
    x[~read.to(device)] = float("nan")
    row_weight = torch.rand(tokens * top_k, generator=generator, device=device) if weighted else None
    plan = plan_of(expert_of, shape.experts, block_m, device)
    return GemmCase(x, words, scales, packed, plan, row_weight, expert_of, top_k, block_m, swiglu)


def placed(case: GemmCase, device: torch.device) -> GemmCase:
    """The case with everything that a program reads on a device; copies alone, no kernels."""
    if case.x.device == device:
        return case
    return case._replace(
        x=case.x.to(device),
        words=case.words.to(device),
        scales=case.scales.to(device),
        packed=case.packed.to(device),
        plan=BlockPlan(*(tensor.to(device) for tensor in case.plan)),
        row_weight=None if case.row_weight is None else case.row_weight.to(device),
    )


def run_program(case: GemmCase, program: str, out: torch.Tensor, plan: BlockPlan | None = None) -> None:
    """Launches one program on a case's inputs, whatever the routes say."""
    launch.gemm(
        case.x,
        case.packed.data,
        plan or case.plan,
        case.row_weight,
        out,
        case.packed.shape,
        top_k=case.top_k,
        block_m=case.block_m,
        expert_rows=0,
        invariant=False,
        swiglu=case.swiglu,
        program=program,
    )


class Judged(Protocol):
    """What a case must have to be judged: whose row each row of the result is (-1: nobody's), and a row's length."""

    @property
    def x(self) -> torch.Tensor: ...
    @property
    def expert_of(self) -> torch.Tensor: ...
    @property
    def columns(self) -> int: ...


def poisoned_output(case: Judged) -> tuple[torch.Tensor, torch.Tensor]:
    """(int16 memory, the bfloat16 output [rows, columns] inside it), all poison."""
    rows, device = case.expert_of.numel(), case.x.device
    memory = torch.full((rows + 2 * _MARGIN, case.columns), POISON, dtype=torch.int16, device=device)
    return memory, memory[_MARGIN : _MARGIN + rows].view(torch.bfloat16)


class Expected(NamedTuple):
    """A case's exact result, the plain reference's error against it, and [rows] bool, which rows are somebody's."""

    exact: torch.Tensor
    error: float
    named: torch.Tensor

    @classmethod
    def of(cls, case: GemmCase) -> Expected:
        given = (case.x, case.words, case.scales, case.expert_of, case.row_weight)
        return cls.of_rows(*given, top_k=case.top_k, swiglu=case.swiglu)

    @classmethod
    def of_rows(
        cls,
        x: torch.Tensor,
        words: torch.Tensor,
        scales: torch.Tensor,
        expert_of: torch.Tensor,
        row_weight: torch.Tensor | None,
        *,
        top_k: int,
        swiglu: bool,
    ) -> Expected:
        """For rows [M, K], of which result row i reads i / top_k and belongs to expert_of[i]."""
        rows = reference.rows_by_expert(expert_of.to(x.device))
        given = (x, words, scales, rows)
        exact = reference.moe_w4a16(*given, top_k=top_k, row_weight=row_weight, exact=True, swiglu=swiglu)
        plain = reference.moe_w4a16(*given, top_k=top_k, row_weight=row_weight, swiglu=swiglu)
        error = reference.rms_error(plain, exact) if rows else 0.0  # both have zeros in rows of nobody
        return cls(exact, error, (expert_of >= 0).to(x.device))


def gemm_problems(case: GemmCase, expected: Expected, program: str) -> Iterator[str]:
    """What is wrong with a program on a case, judged where `expected` lies; nothing for a pass."""
    return problems_of(case, expected, program, lambda out: run_program(case, program, out))


def problems_of(case: Judged, expected: Expected, program: str, run: Callable[[torch.Tensor], None]) -> Iterator[str]:
    """The same for any operator: run writes the case's result [rows, columns] into its argument.

    Reads back once: where processes share a GPU, each time waits for the others' turns.
    """
    memory, out = poisoned_output(case)
    run(out)
    first = memory.to(expected.exact.device, copy=True)
    run(out)
    memory = memory.to(expected.exact.device)
    rows, others = expected.named.numel(), ~expected.named.unsqueeze(1)
    inside = memory[_MARGIN : _MARGIN + rows]
    difference = (inside.view(torch.bfloat16).to(torch.float64) - expected.exact).masked_fill_(others, 0.0)
    found = (
        (first != memory).any(),
        (memory[:_MARGIN] != POISON).any() | (memory[_MARGIN + rows :] != POISON).any(),
        ((inside != POISON) & others).any(),
        (difference.square().sum() / expected.exact.square().sum()).sqrt(),
    )
    changed, outside, unnamed, error = torch.stack([value.to(torch.float64) for value in found]).tolist()
    if changed:
        yield f"{program}: two runs differ"
    if outside:
        yield f"{program}: wrote outside the output"
    if unnamed:
        yield f"{program}: wrote rows that are nobody's"
    if (case.expert_of >= 0).any() and not error <= ERROR_RATIO * expected.error + _SLACK:
        yield f"{program}: RMS error {error:.3e}, the plain reference has {expected.error:.3e}"
