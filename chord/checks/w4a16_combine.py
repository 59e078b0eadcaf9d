"""Checks of the down projection that sums each token's rows: against float64, and bit for bit against two operators.

Absent experts come as ids of -1, ids beyond all experts, and ids that the map sends elsewhere; their weights and the
rows of x that nobody reads hold NaN, and the scratch rows hold poison.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from chord.checks.w4a16 import ERROR_RATIO, POISON, GemmCase, gemm_case, placed, run_program
from chord.w4a16 import launch, reference
from chord.w4a16.combine import prepare_moe_w4a16_combine
from chord.w4a16.layout import WeightShape
from chord.w4a16.rows import combine_rows

_ELSEWHERE = 3
"""Experts before the local ones, and behind them."""
_GUARD_ROWS = 2
_FAULTS = (
    "two runs differ",
    "wrote outside the output",
    f"other bits than {launch.OPERATOR} and moe_combine",
    "a token without an expert here is not zero",
)
_SLACK = 1e-9


class CombineCase(NamedTuple):
    """A down projection's inputs, and what the tokens are told to take of it."""

    gemm: GemmCase
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.expert_map.numel()


class Expected(NamedTuple):
    """The exact sums [M, N] in float64, and the plain reference's error against them."""

    exact: torch.Tensor
    error: float


def combine_case(
    shape: WeightShape, tokens: int, top_k: int, block_m: int, routing: str, device: torch.device, seed: int = 0
) -> CombineCase:
    """Random rows, weights and routes; a few tokens have no expert here."""
    gemm = gemm_case(shape, tokens * top_k, 1, block_m, routing, device, seed=seed)
    pairs = gemm.expert_of.numel()
    absent = torch.tensor([-1, 0, shape.experts + 2 * _ELSEWHERE, 1 << 30])[torch.arange(pairs) % 4]
    here = gemm.expert_of >= 0
    ids = torch.where(here, gemm.expert_of + _ELSEWHERE, absent)
    weights = torch.rand(pairs, generator=torch.Generator().manual_seed(seed + 2)) + 0.01
    weights[~here] = float("nan")
    local = torch.arange(shape.experts)
    expert_map = torch.nn.functional.pad(local, (_ELSEWHERE, _ELSEWHERE), value=-1)
    return CombineCase(
        gemm,
        weights.view(tokens, top_k).to(device),
        ids.view(tokens, top_k).to(device, torch.int32),
        expert_map.to(device, torch.int32),
    )


def moved(case: CombineCase, device: torch.device) -> CombineCase:
    """The case with everything that a program reads on a device; copies alone, no kernels."""
    if case.topk_ids.device == device:
        return case
    return CombineCase(placed(case.gemm, device), *(tensor.to(device) for tensor in case[1:]))


def expected_of(case: CombineCase) -> Expected:
    """Judged where the case lies."""
    gemm, weights = case.gemm, case.topk_weights
    tokens, top_k = weights.shape
    owners = gemm.expert_of.to(gemm.x.device)
    rows = reference.rows_by_expert(owners)
    given = (gemm.x, gemm.words, gemm.scales, rows)
    factors = torch.where(owners.view_as(weights) >= 0, weights, 0.0).unsqueeze(-1)
    exact = reference.moe_w4a16(*given, top_k=1, exact=True).view(tokens, top_k, -1)
    exact = (exact * factors.double()).sum(dim=1)
    plain = reference.moe_w4a16(*given, top_k=1).view(tokens, top_k, -1)
    summed = (plain.float() * factors).sum(dim=1).to(torch.bfloat16)
    return Expected(exact, reference.rms_error(summed, exact) if rows else 0.0)


def combine_problems(case: CombineCase, expected: Expected, program: str) -> Iterator[str]:
    """What is wrong with the sums behind a program of moe_w4a16, judged where `expected` lies; nothing for a pass."""
    gemm, device = case.gemm, case.topk_ids.device
    (tokens, top_k), n = case.topk_ids.shape, gemm.packed.shape.n
    memory = torch.full((tokens + 2 * _GUARD_ROWS, n), POISON, dtype=torch.int16, device=device)
    routed = torch.full((tokens * top_k, n), POISON, dtype=torch.int16, device=device)
    out = memory[_GUARD_ROWS : _GUARD_ROWS + tokens]
    prepared = prepare_moe_w4a16_combine(
        gemm.x, gemm.packed, gemm.plan, case.topk_weights, case.topk_ids, block_m=gemm.block_m,
        num_experts=case.num_experts, local_experts=case.expert_map, routed=routed.view(torch.bfloat16),
        out=out.view(torch.bfloat16), program=program,
    )  # fmt: skip
    judge = expected.exact.device
    prepared()
    first = memory.to(judge, copy=True)
    changed = torch.zeros((), dtype=torch.bool, device=judge)
    for _ in range(2):
        routed.fill_(POISON)
        prepared()
        changed |= (first != memory.to(judge)).any()
    sums = first[_GUARD_ROWS : _GUARD_ROWS + tokens]
    nobody = (gemm.expert_of.view(tokens, top_k) < 0).all(dim=1)
    difference = sums.view(torch.bfloat16).to(torch.float64) - expected.exact
    found = (
        changed,
        (first[:_GUARD_ROWS] != POISON).any() | (first[_GUARD_ROWS + tokens :] != POISON).any(),
        (sums != two_operators(case, program, judge).to(judge).view(torch.int16)).any(),
        ((sums != 0) & nobody.to(judge).unsqueeze(1)).any(),
        (difference.square().sum() / expected.exact.square().sum()).sqrt(),
    )
    *faults, error = torch.stack([value.to(torch.float64) for value in found]).tolist()
    yield from (f"{program}: {what}" for what, fault in zip(_FAULTS, faults, strict=True) if fault)
    if not nobody.all() and not error <= ERROR_RATIO * expected.error + _SLACK:
        yield f"{program}: RMS error {error:.3e}, the plain reference has {expected.error:.3e}"


def two_operators(case: CombineCase, program: str, made_on: torch.device) -> torch.Tensor:
    """[M, N] bfloat16 by the same program, and moe_combine. made_on: where the rows between them are first filled."""
    size = case.topk_ids.numel(), case.gemm.columns
    rows = torch.full(size, float("nan"), dtype=torch.bfloat16, device=made_on).to(case.topk_ids.device)
    run_program(case.gemm, program, rows)
    out = torch.empty(case.topk_ids.shape[0], case.gemm.columns, dtype=torch.bfloat16, device=rows.device)
    experts = {"num_experts": case.num_experts, "expert_map": case.expert_map}
    combine_rows(rows, out, case.topk_weights, case.topk_ids, **experts)  # type: ignore[arg-type]
    return out
