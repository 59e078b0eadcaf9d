"""gate_up with its SwiGLU beside two kernels: Humming's GEMM and activation, and chord's own GEMM with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from chord.bench.results import Row, cubin_of
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import BLOCK_M, SHAPES, Cell, Weights, checked_launch, draw_work, least_bytes, working
from chord.bench.w4a16_peers import Peer, SwigluPeer, Work
from chord.w4a16 import WeightShape

SWIGLU = "swiglu_ep8"
TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Tokens of all eight GPUs, which are the rows of this one."""


class SwigluCell(NamedTuple):
    """One row to be measured."""

    tokens: int

    @property
    def shape(self) -> WeightShape:
        return SHAPES["ep8_prefill"]["gate_up"]


def cells(scenarios: Iterable[str]) -> list[SwigluCell]:
    """The cells, if their scenario is wanted."""
    return [SwigluCell(tokens) for tokens in TOKENS] if SWIGLU in set(scenarios) else []


def measure_cell(
    cell: SwigluCell, weights: Weights, timer: EventTimer, peers: Sequence[Peer], samples: int
) -> Row:  # fmt: skip
    """One row: the routed program with its fused store, the peers' two kernels, and chord's GEMM with torch's two."""
    work = draw_work(Cell("ep8_prefill", "gate_up", cell.tokens))
    prepared = checked_launch(work, weights, swiglu=True)
    calls: dict[str, Callable[[], object]] = {"chord": prepared.launch, "unfused": _unfused(work, weights)}
    for peer in peers:
        if isinstance(peer, SwigluPeer):
            calls |= working(peer, work, peer.swiglu_calls)
    times = {name: summarize(values) for name, values in timer.measure(calls, samples).items()}
    ours, unfused = times.pop("chord"), times.pop("unfused", None)
    active = int(work.ids.unique().numel())  # type: ignore[no-untyped-call]
    saved = work.pairs * cell.shape.n  # half of the columns, two bytes each
    return Row(
        scenario=SWIGLU,
        proj="gate_up",
        tokens=cell.tokens,
        block_m=BLOCK_M,
        program=prepared.program,
        cubin_sha256=cubin_of(prepared.program, work.x.device),
        samples=samples,
        us=ours.median,
        p10=ours.p10,
        p90=ours.p90,
        bytes=least_bytes(cell.shape, active, work.x.shape[0], work.pairs) - saved,
        peers={name: summary.median for name, summary in times.items()},
        chord={} if unfused is None else {"unfused": unfused.median},
    )


def _unfused(work: Work, weights: Weights) -> Callable[[], object]:
    prepared = checked_launch(work, weights)
    gate, up = prepared.out.chunk(2, dim=1)
    active = torch.empty_like(gate, memory_format=torch.contiguous_format)

    def call() -> None:
        prepared.launch()
        torch.mul(torch.nn.functional.silu(gate), up, out=active)

    return call
