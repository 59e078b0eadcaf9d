"""The grouped W4A16 operators beside their peers: equal rows an expert, and the ragged rows that routing leaves.

Each sorted-rows cell with random routing is also measured as the indexed operator on the unsorted tokens, and as the
gather that sorts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from chord.bench.results import Row, cubin_of
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import SHAPES, Cell, Weights, checked_launch, draw_work, least_bytes, sampled_problem, working
from chord.bench.w4a16_peers import GroupedPeer, Peer, Work
from chord.w4a16 import PreparedMoeW4A16, WeightShape, prepare_moe_w4a16_contiguous, prepare_moe_w4a16_masked

CONTIGUOUS, MASKED, SORTED = "grouped_contiguous", "grouped_masked", "sorted_ep8"
SIZES = {CONTIGUOUS: (128, 256, 512), MASKED: (8, 16, 32, 64), SORTED: (1024, 2048, 4096, 8192, 16384)}
"""Rows of an expert, or with random routing tokens of all eight GPUs, which are the rows of this one."""
LARGE_SLAB = 4096
"""Rows of a slab, of which hardly any hold something: it must not cost more than a small one."""


class GroupedCell(NamedTuple):
    """One row to be measured. size: see SIZES."""

    scenario: str
    proj: str
    size: int

    @property
    def shape(self) -> WeightShape:
        return SHAPES["ep8_prefill"][self.proj]


def cells(scenarios: Iterable[str]) -> list[GroupedCell]:
    """The cells of some of SIZES, those that share weights one after the other."""
    wanted = set(scenarios)
    return [
        GroupedCell(scenario, proj, size)
        for proj in ("gate_up", "down")
        for scenario, sizes in SIZES.items()
        if scenario in wanted
        for size in sizes
    ]


def measure_cell(
    cell: GroupedCell, weights: Weights, timer: EventTimer, peers: Sequence[Peer], samples: int
) -> Row:  # fmt: skip
    """One row: the routed program, the peers that serve rows in this form, and chord's other ways."""
    work = draw_rows(cell)
    prepared = checked_rows(cell, work, weights)
    calls: dict[str, Callable[[], object]] = {"chord": prepared.launch}
    if cell.scenario == MASKED:
        calls["large_slab"] = checked_rows(cell, work, weights, rows_each=LARGE_SLAB)
    if cell.scenario == SORTED:
        calls |= _unsorted(cell, weights)
    own = set(calls) - {"chord"}
    for peer in peers:
        if isinstance(peer, GroupedPeer):
            kind = "masked" if cell.scenario == MASKED else "contiguous"
            calls |= working(peer, work, partial(peer.grouped_calls, kind=kind))
    times = {name: summarize(values) for name, values in timer.measure(calls, samples).items()}
    is_sorted = cell.scenario == SORTED
    return Row(
        scenario=cell.scenario,
        proj=cell.proj,
        tokens=cell.size if is_sorted else None,
        rows_per_expert=None if is_sorted else cell.size,
        program=prepared.program,
        cubin_sha256=cubin_of(prepared.program, work.x.device),
        samples=samples,
        us=times["chord"].median,
        p10=times["chord"].p10,
        p90=times["chord"].p90,
        bytes=least_bytes(cell.shape, int(work.ids.unique().numel()), work.pairs, work.pairs),  # type: ignore[no-untyped-call]
        peers={name: summary.median for name, summary in times.items() if name not in own and name != "chord"},
        chord={name: summary.median for name, summary in times.items() if name in own},
    )


def draw_rows(cell: GroupedCell) -> Work:
    """Rows in the order of their experts, and the expert of each; top_k is 1."""
    if cell.scenario == SORTED:
        drawn = draw_work(Cell("ep8_prefill", cell.proj, cell.size))
        order = drawn.ids.flatten().argsort(stable=True)
        return Work(cell.shape, drawn.x[order // drawn.top_k], drawn.ids.flatten()[order][:, None], 1)
    torch.manual_seed(cell.size)
    ids = torch.arange(cell.shape.experts, dtype=torch.int32, device="cuda").repeat_interleave(cell.size)
    return Work(cell.shape, torch.randn(ids.numel(), cell.shape.k, device="cuda").to(torch.bfloat16), ids[:, None], 1)


def checked_rows(
    cell: GroupedCell, work: Work, weights: Weights, *, rows_each: int | None = None, program: str | None = None
) -> PreparedMoeW4A16:
    """A prepared launch of the routed program, or the named one, after rows of its result were compared.

    rows_each: of a slab; default twice the rows that it holds, at least 64. Raises RuntimeError for a wrong result.
    """
    experts = cell.shape.experts
    owners = work.ids.flatten().to(torch.int64)
    counts = torch.bincount(owners, minlength=experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    if cell.scenario == MASKED:
        each = rows_each or max(2 * cell.size, 64)
        place = torch.arange(owners.numel(), device=work.x.device) - offsets[owners]
        slabs = torch.full((experts, each, cell.shape.k), float("nan"), dtype=torch.bfloat16, device=work.x.device)
        slabs[owners, place] = work.x
        prepared = prepare_moe_w4a16_masked(
            slabs, weights.packed, counts.to(torch.int32), expected_rows=cell.size, program=program
        )
        rows = owners * each + place
    else:
        prepared = prepare_moe_w4a16_contiguous(work.x, weights.packed, offsets=offsets, program=program)
        rows = torch.arange(owners.numel(), device=work.x.device)
    prepared.out.fill_(float("nan"))
    prepared()
    problem = sampled_problem(work, weights, prepared.out.view(-1, cell.shape.n)[rows])
    if problem:
        raise RuntimeError(f"{prepared.program} is wrong, so it is not timed: {problem}")
    return prepared


def _unsorted(cell: GroupedCell, weights: Weights) -> dict[str, Callable[[], object]]:
    """The same routing from the other side: the indexed operator, and sorting the rows."""
    drawn = draw_work(Cell("ep8_prefill", cell.proj, cell.size))
    source = drawn.ids.flatten().argsort(stable=True) // drawn.top_k
    target = torch.empty(drawn.pairs, cell.shape.k, dtype=torch.bfloat16, device=drawn.x.device)
    return {
        "indexed": checked_launch(drawn, weights),
        "gather": lambda: torch.index_select(drawn.x, 0, source, out=target),
    }
