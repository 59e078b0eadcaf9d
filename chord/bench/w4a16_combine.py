"""down with the sums of its rows, beside two launches: chord's own GEMM and moe_combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from chord.bench.results import Row, cubin_of
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import BLOCK_M, SHAPES, Cell, Weights, checked_launch, draw_work, least_bytes
from chord.bench.w4a16_peers import Work
from chord.checks.compare import same_bits
from chord.router import route_plan
from chord.w4a16 import PreparedMoeW4A16, WeightShape, prepare_moe_w4a16_combine
from chord.w4a16.rows import combine_rows

TOKENS = {
    "combine_ep8_decode": (20, 50),
    "combine_ep8_prefill": (1024, 2048, 4096, 8192, 16384),
    "combine_tp8": (20, 1024, 2048, 4096, 8192, 16384),
}
"""By scenario; as the scenarios of `w4a16.SHAPES` count tokens."""


class CombineCell(NamedTuple):
    """One row to be measured."""

    scenario: str
    tokens: int

    @property
    def plain(self) -> Cell:
        """The same work without sums."""
        return Cell(self.scenario.removeprefix("combine_"), "down", self.tokens)

    @property
    def shape(self) -> WeightShape:
        return SHAPES[self.plain.scenario]["down"]


def cells(scenarios: Iterable[str]) -> list[CombineCell]:
    """The cells of the scenarios that are wanted."""
    wanted = set(scenarios)
    return [CombineCell(name, tokens) for name, counts in TOKENS.items() if name in wanted for tokens in counts]


def measure_cell(cell: CombineCell, weights: Weights, timer: EventTimer, samples: int) -> Row:
    """One row: the operator, its GEMM and its sums as two launches, and the GEMM alone.

    Raises RuntimeError when the bits of the two ways differ.
    """
    work = draw_work(cell.plain)
    tokens, top_k = work.ids.shape
    factors = torch.rand(tokens, top_k, device=work.x.device)
    down = checked_launch(work, weights)
    separate = torch.empty(tokens, cell.shape.n, dtype=torch.bfloat16, device=work.x.device)

    def two_launches() -> None:
        down.launch()
        combine_rows(down.out, separate, factors, work.ids, num_experts=cell.shape.experts)

    fused = _fused(work, weights, factors)
    fused()
    two_launches()
    if not same_bits(fused.out, separate):
        raise RuntimeError(f"{fused.program} has other bits than its two parts, so it is not timed")
    calls: dict[str, Callable[[], object]] = {
        "chord": fused.launch,
        "two_launches": two_launches,
        "down_alone": down.launch,
    }
    times = {name: summarize(values) for name, values in timer.measure(calls, samples).items()}
    ours = times.pop("chord")
    active = int(work.ids.unique().numel())  # type: ignore[no-untyped-call]
    return Row(
        scenario=cell.scenario,
        proj="down",
        tokens=cell.tokens,
        block_m=BLOCK_M,
        program=fused.program,
        cubin_sha256=cubin_of(fused.program, work.x.device),
        samples=samples,
        us=ours.median,
        p10=ours.p10,
        p90=ours.p90,
        bytes=least_bytes(cell.shape, active, work.pairs, tokens),
        peers={},
        chord={name: summary.median for name, summary in times.items()},
    )


def _fused(work: Work, weights: Weights, factors: torch.Tensor) -> PreparedMoeW4A16:
    plan = route_plan(work.ids, work.shape.experts, BLOCK_M)
    return prepare_moe_w4a16_combine(work.x, weights.packed, plan, factors, work.ids, block_m=BLOCK_M)
