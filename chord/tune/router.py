"""Tuning the fused router: every arm that admits a size is timed on the present GPU, and the table gets the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from chord import _paths, _runtime
from chord.bench.results import Results, Row, describe_run, file_name, write
from chord.bench.router import METHOD, checked_launch
from chord.bench.stats import summarize
from chord.bench.timing import ColdTimer, Subject, graphed
from chord.checks.inputs import SELECTIONS, RouterCase, normal_case
from chord.checks.router import Settings, candidates
from chord.registry.schema import Program
from chord.router.validate import MAX_TOKENS
from chord.tune.routes import Interval, choose
from chord.tune.table import Box, write_routes

TOKEN_COUNTS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 300, 384, 512, 640, 768, 1024, 1280, 1536),
    *(1792, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 32768, 65536),
)
BLOCK_M_CLASSES = ((8, 8, 8), (16, 16, 16), (24, 256, 64))
"""First and last block_m of a class, and the one that is measured for it."""


class Tuned(NamedTuple):
    """Routes of one combination of experts and block_m class, and the times behind them."""

    num_experts: int
    block_m: tuple[int, int]
    intervals: list[Interval]


def tune(
    *,
    token_counts: Sequence[int] = TOKEN_COUNTS,
    hysteresis: float = 0.03,
    samples: int = 41,
    steady_ms: int = 30,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> tuple[Results, list[Tuned]]:
    """Times the sweep with float32 logits; the routes hold for bfloat16 as well, whose programs differ in the load
    only.

    Each result row is a program; its scenario is "tune_k3" or "tune_k2". Raises RuntimeError for a wrong result.
    """
    results = describe_run("router", METHOD, "read", steady_ms, {}, commit)
    timer = ColdTimer(steady_ms)
    tuned = []
    for num_experts, _ in SELECTIONS:
        for first, last, measured in BLOCK_M_CLASSES:
            sweep = _Sweep(num_experts, measured)
            for tokens in token_counts:
                for row in sweep.measure(tokens, timer, samples):
                    results.rows.append(row)
                    progress(row)
            tuned.append(Tuned(num_experts, (first, last), sweep.intervals(hysteresis)))
    return results, tuned


def write_tuned(results: Results, tuned: Sequence[Tuned], folder: Path, table: Path | None = None) -> Path:
    """Writes the results file into `folder` and the routes into the table. Returns the results file's path.

    The table is registry/fused_router.toml unless named; `chord build` then checks it and renews the manifest.
    """
    path = folder / file_name(results).replace("-router.json", "-router-tune.json")
    write(results, path)
    arch = _runtime.architecture(torch.cuda.current_device())
    note = f"measured on {results.gpu}, {results.date}, bench/results/{path.name}"
    boxes = [Box({"block_m": entry.block_m}, {"num_experts": [entry.num_experts]}, entry.intervals) for entry in tuned]
    write_routes(table or _paths.registry_dir() / "fused_router.toml", arch, boxes, note)
    return path


class _Sweep:
    """Times of all arms for one expert count and block_m."""

    def __init__(self, num_experts: int, block_m: int) -> None:
        self.num_experts = num_experts
        self.settings = Settings(block_m)
        self.general: dict[int, dict[str, float]] = {}
        self.exact: dict[int, dict[str, float]] = {}
        self.limits: dict[str, int] = {}

    def measure(self, tokens: int, timer: ColdTimer, samples: int) -> Iterator[Row]:
        """One row per arm that admits the count."""
        device = torch.device("cuda", torch.cuda.current_device())
        case = normal_case(tokens, self.num_experts, torch.float32, device, seed=self.settings.block_m)
        programs = _runtime.registry().manifest.operators["fused_router"].programs
        chosen = most_specific({name: programs[name] for name in candidates(case, self.settings)})
        times = timer.measure({arm: self._subject(case, name) for arm, name in chosen.items()}, samples)
        arch = _runtime.architecture(torch.cuda.current_device())
        for arm, name in chosen.items():
            summary = summarize(times[arm])
            self._remember(tokens, arm, programs[name], summary.median)
            yield Row(
                scenario="tune_k3" if self.num_experts == SELECTIONS[0][0] else "tune_k2",
                tokens=tokens,
                block_m=self.settings.block_m,
                program=name,
                cubin_sha256=programs[name].builds[arch].cubin_sha256,
                samples=samples,
                us=summary.median,
                p10=summary.p10,
                p90=summary.p90,
            )

    def intervals(self, hysteresis: float) -> list[Interval]:
        """Routes over the whole domain of num_tokens."""
        return choose(self.general, self.exact, first=0, last=MAX_TOKENS, limits=self.limits, hysteresis=hysteresis)

    def _subject(self, case: RouterCase, program: str) -> Subject:
        call, _ = checked_launch(case, self.settings, program)
        return Subject(graphed(call), "span")

    def _remember(self, tokens: int, arm: str, program: Program, us: float) -> None:
        if program.num_tokens is not None:
            self.exact.setdefault(tokens, {})[arm] = us
            return
        self.general.setdefault(tokens, {})[arm] = us
        limit = program.limit("num_tokens")
        if limit is not None:
            self.limits[arm] = limit


def most_specific(programs: dict[str, Program]) -> dict[str, str]:
    """By arm the program that a route would take: the one with most constants fixed, sorted by arm."""
    chosen: dict[str, str] = {}
    for name, program in sorted(programs.items()):
        other = chosen.get(program.arm)
        if other is None or _fixed(program) > _fixed(programs[other]):
            chosen[program.arm] = name
    return dict(sorted(chosen.items()))


def _fixed(program: Program) -> int:
    return (program.num_tokens is not None) + (program.block_m is not None)
