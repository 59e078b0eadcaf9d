"""Tuning the fused router: every arm that admits a size is timed on the present GPU, and the table gets the routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from chord import _runtime
from chord.bench.results import Results, Row, describe_run
from chord.bench.router import METHOD
from chord.bench.stats import Summary
from chord.bench.timing import ColdTimer, Subject
from chord.checks.graphs import graphed
from chord.checks.inputs import SELECTIONS, RouterCase, normal_case
from chord.checks.router import Buffers, Settings, candidates, poisoned_buffers, prepared_on, verdict
from chord.registry.schema import Program
from chord.router.validate import MAX_TOKENS
from chord.tune import sweep
from chord.tune.table import Box
from chord.tune.tuning import Tuning

TOKEN_COUNTS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 300, 384, 512, 640, 768, 1024, 1280, 1536),
    *(1792, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 32768, 65536),
)


class BlockClass(NamedTuple):
    """Values of block_m that share their routes."""

    first: int
    last: int
    measured: int
    thin: bool
    """At fewer counts: it has programs like those of another class, so that its times differ little."""


BLOCK_M_CLASSES = (BlockClass(8, 8, 8, False), BlockClass(16, 16, 16, True), BlockClass(24, 256, 64, False))


class Part(NamedTuple):
    """What is tuned; the routes of everything else stay. experts, block_m: none for all."""

    experts: tuple[int, ...] = ()
    block_m: tuple[int, ...] = ()
    """A class of BLOCK_M_CLASSES is tuned when it holds one of these."""
    max_tokens: int | None = None

    def classes(self) -> list[tuple[int, BlockClass]]:
        """(experts, class of block_m) in the order of measurement. Raises ValueError for what is in none."""
        known = [experts for experts, _ in SELECTIONS]
        if not set(self.experts) <= set(known):
            raise ValueError(f"experts: expected some of {known}, got {sorted(set(self.experts).difference(known))}")
        if any(block_m not in range(8, 257, 8) for block_m in self.block_m):
            raise ValueError(f"block_m: expected multiples of 8 up to 256, got {list(self.block_m)}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens: expected 1 to {MAX_TOKENS}, got {self.max_tokens}")
        return [
            (experts, blocks)
            for experts in known
            for blocks in BLOCK_M_CLASSES
            if not self.experts or experts in self.experts
            if not self.block_m or any(blocks.first <= block_m <= blocks.last for block_m in self.block_m)
        ]


def tune(
    part: Part = Part(),  # noqa: B008 - it is immutable
    *,
    hysteresis: float = 0.03,
    samples: int = 41,
    steady_ms: int = 10,
    limit_s: float | None = None,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Tuning:
    """Times the sweep with float32 logits; the routes hold for bfloat16 as well, whose programs differ in the load
    only. Each result row is a program; its scenario is "tune_k3" or "tune_k2".

    A program that is wrong or cannot run is left out and named. `limit_s`, an interruption or a lost GPU end the sweep
    after the last count; what was measured stays. save is called after each count. Raises ValueError for no such part.
    """
    classes, counts = part.classes(), sweep.up_to(TOKEN_COUNTS, part.max_tokens)
    budget = sweep.Budget(limit_s)
    arch = _runtime.architecture(torch.cuda.current_device())
    results = describe_run("router", METHOD + sweep.METHOD, "read", steady_ms, {}, commit)
    tuning = Tuning("fused_router", arch, results)
    timer = ColdTimer(steady_ms)
    try:
        for num_experts, blocks in classes:
            bench = RouterBench(num_experts, blocks.measured, timer, samples)
            label = f"{num_experts} experts, block_m {blocks.measured}: "
            report = partial(_report, tuning.problems, label)
            measured = sweep.Sweep(sweep.thin(counts) if blocks.thin else counts, bench, report)
            for tokens in measured.counts:
                if budget.spent():
                    tuning.stopped = "the time limit is over"
                    return tuning
                for arm, summary in measured.measure(tokens).items():
                    results.rows.append(bench.row(tokens, arm, summary, arch))
                    progress(results.rows[-1])
                save(results)
            try:
                intervals = measured.intervals(0, part.max_tokens or MAX_TOKENS, hysteresis)
            except ValueError as error:
                report(f"no routes, {error}")
            else:
                where = {"block_m": (blocks.first, blocks.last)}
                tuning.boxes.append(Box(where, {"num_experts": [num_experts]}, intervals))
    except KeyboardInterrupt:
        tuning.stopped = "interrupted"
    except sweep.GpuLostError as error:
        tuning.stopped, tuning.lost = str(error), True
    return tuning


def _report(problems: list[str], label: str, problem: str) -> None:
    problems.append(label + problem)


class RouterBench:
    """The router's arms on the present GPU, for one expert count and block_m."""

    def __init__(self, num_experts: int, block_m: int, timer: ColdTimer, samples: int) -> None:
        self._num_experts = num_experts
        self._settings = Settings(block_m)
        self._timer = timer
        self._samples = samples
        self._case: RouterCase | None = None
        self._names: dict[str, str] = {}

    def arms(self, count: int) -> Mapping[str, Program]:
        """The program of each arm that admits a count, and makes the inputs for it."""
        device = torch.device("cuda", torch.cuda.current_device())
        self._case = normal_case(count, self._num_experts, torch.float32, device, seed=self._settings.block_m)
        programs = _runtime.operator("fused_router").programs
        self._names = most_specific({name: programs[name] for name in candidates(self._case, self._settings)})
        return {arm: programs[name] for arm, name in self._names.items()}

    def time(self, count: int, arms: Sequence[str]) -> tuple[Mapping[str, Sequence[float]], Mapping[str, str]]:
        """The first arm that is right is held against the reference, the others against its bits."""
        subjects: dict[str, Subject] = {}
        problems: dict[str, str] = {}
        right: Buffers | None = None
        for arm in arms:
            ready = partial(self._ready, arm, right)
            done, problem = sweep.attempt(self._names[arm], ready, torch.cuda.synchronize)
            if done is None:
                problems[arm] = problem
            else:
                subjects[arm], outputs = done
                right = right or outputs
        if not subjects:
            return {}, problems
        names = " or ".join(self._names[arm] for arm in subjects)
        measure = partial(self._timer.measure, subjects, self._samples)
        times, problem = sweep.attempt(names, measure, torch.cuda.synchronize)
        if times is None:
            raise sweep.NotTimedError(problem)
        return times, problems

    def row(self, count: int, arm: str, summary: Summary, arch: str) -> Row:
        """An arm's row for the results, of the count that was timed last."""
        name = self._names[arm]
        build = _runtime.operator("fused_router").programs[name].builds[arch]
        return Row(
            scenario="tune_k3" if self._num_experts == SELECTIONS[0][0] else "tune_k2",
            tokens=count,
            block_m=self._settings.block_m,
            program=name,
            cubin_sha256=build.cubin_sha256,
            samples=summary.samples,
            us=summary.median,
            p10=summary.p10,
            p90=summary.p90,
        )

    def _ready(self, arm: str, right: Buffers | None) -> tuple[Subject, Buffers]:
        """(what is timed, outputs that were right). Raises ValueError for wrong ones."""
        assert self._case is not None  # noqa: S101 - arms() made it
        name = self._names[arm]
        buffers = poisoned_buffers(self._case, self._settings)
        prepared = prepared_on(self._case, self._settings, buffers, name)
        prepared()
        problems = verdict(self._case, self._settings, buffers, right)
        if problems:
            raise ValueError(f"{name} is wrong: {'; '.join(problems[:3])}")
        kernels = len(_runtime.operator("fused_router").programs[name].kernels)
        return Subject(graphed(prepared), "span", kernels), buffers


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
