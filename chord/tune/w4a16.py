"""Tuning the W4A16 GEMM: every arm is timed on Kimi K2's shapes on the present GPU, and the table gets the routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from chord import _paths, _runtime
from chord.bench.results import Results, Row, describe_run, file_name, write
from chord.bench.stats import geometric_mean, summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import BLOCK_M, METHOD, SHAPES, TOP_K, Cell, Weights, checked_launch, draw_work, make_weights
from chord.tune.routes import Interval, choose
from chord.tune.table import Box, write_routes
from chord.w4a16.launch import MAX_EXPERT_ROWS, OPERATOR

EXPERT_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384)
SCENARIOS = ("ep8_decode", "tp8")
"""Where tokens are those of this GPU, so that rows of an expert = tokens * TOP_K / experts."""

Times = Mapping[int, Mapping[str, Sequence[float]]]
"""Microseconds by rows of an expert and arm, one for each shape."""


def tune(
    *,
    expert_rows: Sequence[int] = EXPERT_ROWS,
    hysteresis: float = 0.02,
    samples: int = 41,
    steady_ms: int = 50,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> tuple[Results, list[Interval]]:
    """Times the sweep with random routing. Each result row is a program on a shape; scenarios are "tune_<split>".

    Raises RuntimeError for a wrong result.
    """
    results = describe_run("w4a16", METHOD, "read", steady_ms, {}, commit)
    timer = EventTimer(steady_ms)
    times: dict[int, dict[str, list[float]]] = {rows: {} for rows in expert_rows}
    for scenario in SCENARIOS:
        for proj, shape in SHAPES[scenario].items():
            weights = make_weights(shape)
            for rows in expert_rows:
                cell = Cell(scenario, proj, tokens_for(rows, shape.experts))
                for arm, row in _measure(cell, rows, weights, timer, samples).items():
                    times[rows].setdefault(arm, []).append(row.us)
                    results.rows.append(row)
                    progress(row)
            del weights  # before the next ones are made: both need not fit
    return results, intervals(times, hysteresis)


def tokens_for(expert_rows: int, experts: int) -> int:
    """Tokens that give an expert so many rows on average."""
    return max(1, expert_rows * experts // TOP_K)


def intervals(times: Times, hysteresis: float) -> list[Interval]:
    """Routes over all rows of an expert: by the geometric mean over the shapes, of arms that ran on all of them."""
    shapes = max((len(values) for arms in times.values() for values in arms.values()), default=0)
    general = {
        rows: {arm: geometric_mean(values) for arm, values in arms.items() if len(values) == shapes}
        for rows, arms in times.items()
    }
    return choose(general, {}, first=0, last=MAX_EXPERT_ROWS, limits={}, hysteresis=hysteresis)


def write_tuned(results: Results, routes: Sequence[Interval], folder: Path, table: Path | None = None) -> Path:
    """Writes the results file into `folder` and the routes into the table. Returns the results file's path.

    The table is registry/moe_w4a16.toml unless named; `chord build` then checks it and renews the manifest.
    """
    path = folder / file_name(results).replace("-w4a16.json", "-w4a16-tune.json")
    write(results, path)
    arch = _runtime.architecture(torch.cuda.current_device())
    note = f"measured on {results.gpu}, {results.date}, bench/results/{path.name}"
    write_routes(table or _paths.registry_dir() / f"{OPERATOR}.toml", arch, [Box({}, {}, routes)], note)
    return path


def _measure(cell: Cell, rows: int, weights: Weights, timer: EventTimer, samples: int) -> dict[str, Row]:
    """A row by arm, the arms in turn on one routing."""
    work = draw_work(cell)
    arch = _runtime.architecture(work.x.device.index)
    programs = _runtime.registry().programs(OPERATOR, arch)
    calls: dict[str, Callable[[], object]] = {name: checked_launch(work, weights, name).launch for name in programs}
    found = {}
    for name, values in timer.measure(calls, samples).items():
        summary = summarize(values)
        found[programs[name].arm] = Row(
            scenario=f"tune_{cell.scenario.partition('_')[0]}",
            proj=cell.proj,
            tokens=cell.tokens,
            block_m=BLOCK_M,
            rows_per_expert=rows,
            program=name,
            cubin_sha256=programs[name].builds[arch].cubin_sha256,
            samples=samples,
            us=summary.median,
            p10=summary.p10,
            p90=summary.p90,
        )
    return found
