"""gate_up with its SwiGLU beside two kernels: Humming's GEMM and activation, and chord's own GEMM with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from chord import _runtime
from chord.bench.results import Row
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import BLOCK_M, SHAPES, TOP_K, Cell, Weights, checked_launch, draw_work, least_bytes, working
from chord.bench.w4a16_peers import Peer, SwigluPeer, Work
from chord.checks.w4a16 import ERROR_RATIO
from chord.router import route_plan
from chord.w4a16 import PreparedMoeW4A16, WeightShape, prepare_moe_w4a16, reference

SWIGLU = "swiglu_ep8"
TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Tokens of all eight GPUs, which are the rows of this one."""
_CHECKED_PAIRS = 64


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
    prepared = checked_swiglu(work, weights)
    calls: dict[str, Callable[[], object]] = {"chord": prepared.launch, "unfused": _unfused(work, weights)}
    for peer in peers:
        if isinstance(peer, SwigluPeer):
            calls |= working(peer, work, peer.swiglu_calls)
    times = {name: summarize(values) for name, values in timer.measure(calls, samples).items()}
    ours, unfused = times.pop("chord"), times.pop("unfused")
    arch = _runtime.architecture(work.x.device.index)
    build = _runtime.operator("moe_w4a16").programs[prepared.program].builds[arch]
    active = int(work.ids.unique().numel())  # type: ignore[no-untyped-call]
    saved = work.pairs * cell.shape.n  # half of the columns, two bytes each
    return Row(
        scenario=SWIGLU,
        proj="gate_up",
        tokens=cell.tokens,
        block_m=BLOCK_M,
        program=prepared.program,
        cubin_sha256=build.cubin_sha256,
        samples=samples,
        us=ours.median,
        p10=ours.p10,
        p90=ours.p90,
        bytes=least_bytes(cell.shape, active, work.x.shape[0], work.pairs) - saved,
        peers={name: summary.median for name, summary in times.items()},
        chord={"unfused": unfused.median},
    )


def checked_swiglu(work: Work, weights: Weights) -> PreparedMoeW4A16:
    """A prepared launch of the routed program, after rows of its result were compared. Raises RuntimeError."""
    plan = route_plan(work.ids, work.shape.experts, BLOCK_M)
    prepared = prepare_moe_w4a16(work.x, weights.packed, plan, top_k=TOP_K, block_m=BLOCK_M, swiglu=True)
    prepared.out.fill_(float("nan"))
    prepared()
    flat = work.ids.reshape(-1)
    picked = torch.randperm(work.pairs, device=work.x.device)[:_CHECKED_PAIRS]
    rows = {int(e): picked[flat[picked] == e] for e in flat[picked].unique()}  # type: ignore[no-untyped-call]
    given = (work.x, weights.words, weights.scales, rows)
    exact = reference.moe_w4a16(*given, top_k=TOP_K, exact=True, swiglu=True)[picked]
    plain = reference.moe_w4a16(*given, top_k=TOP_K, swiglu=True)[picked]
    error, allowed = reference.rms_error(prepared.out[picked], exact), reference.rms_error(plain, exact) * ERROR_RATIO
    if prepared.out.isnan().any() or not error <= allowed:
        raise RuntimeError(f"{prepared.program} is wrong, so it is not timed: RMS error {error:.3e} of {allowed:.3e}")
    return prepared


def _unfused(work: Work, weights: Weights) -> Callable[[], object]:
    prepared = checked_launch(work, weights)
    gate, up = prepared.out.chunk(2, dim=1)
    active = torch.empty_like(gate, memory_format=torch.contiguous_format)

    def call() -> None:
        prepared.launch()
        torch.mul(torch.nn.functional.silu(gate), up, out=active)

    return call
