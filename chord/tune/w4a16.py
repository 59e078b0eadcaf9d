"""Tuning the W4A16 GEMM: every arm is timed on Kimi K2's shapes on the present GPU, and the table gets the routes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from chord import _runtime
from chord.bench.results import Results, Row, describe_run
from chord.bench.stats import geometric_mean, summarize
from chord.bench.timing import EventTimer, TimelineError
from chord.bench.w4a16 import (
    BLOCK_M,
    METHOD,
    SHAPES,
    TOP_K,
    Cell,
    Weights,
    checked_launch,
    draw_work,
    make_weights,
)
from chord.bench.w4a16_peers import Work
from chord.checks.compare import same_bits
from chord.registry.schema import Program
from chord.router import route_plan
from chord.tune.routes import Interval, choose
from chord.tune.sweep import Budget, GpuLostError, attempt
from chord.tune.table import Box
from chord.tune.tuning import Tuning
from chord.w4a16 import PreparedMoeW4A16, prepare_moe_w4a16
from chord.w4a16.launch import MASKED, MAX_EXPERT_ROWS, OPERATOR, few_arms, serves

EXPERT_ROWS = (1, 4, 8, 16, 20, 22, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384)
SUITS = 1.1
"""An arm that takes no more than this by the best one's time is still suited: wrong expectations may cost 1.15."""
SCENARIOS = ("ep8_decode", "tp8")
"""Where tokens are those of this GPU, so that rows of an expert = tokens * TOP_K / experts."""

Times = Mapping[int, Mapping[str, Sequence[float]]]
"""Microseconds by rows of an expert and arm, one for each shape."""
Side = tuple[int, int]
"""First and last value of an axis."""


def tune(
    *,
    expert_rows: Sequence[int] = EXPERT_ROWS,
    hysteresis: float = 0.02,
    samples: int = 41,
    steady_ms: int = 20,
    limit_s: float | None = None,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Tuning:
    """Times the sweep with random routing. Each result row is a program on a shape; scenarios are "tune_<split>".

    The sweep begins where experts have a row on average: routes for fewer rows (the axis all_rows) stay as they are.
    A program that is wrong or cannot run is left out and named. `limit_s`, an interruption or a lost GPU end the sweep
    after the last measured size, without routes, which need every shape. save is called after each size.
    """
    results = describe_run("w4a16", METHOD, "read", steady_ms, {}, commit)
    tuning = Tuning(OPERATOR, _runtime.architecture(torch.cuda.current_device()), results, kept="all_rows")
    times: dict[Side, dict[int, dict[str, list[float]]]] = {}
    sides = k_sides(program.limit("k") for program in _programs(tuning.arch).values())
    wrong: set[str] = set()
    try:
        for k, found in _sweep(expert_rows, EventTimer(steady_ms), samples, Budget(limit_s), tuning, wrong):
            side = next(side for side in sides if side[0] <= k <= side[1])
            for arm, row in found.items():
                sizes = times.setdefault(side, {rows: {} for rows in expert_rows})
                sizes[row.rows_per_expert or 0].setdefault(arm, []).append(row.us)
                results.rows.append(row)
                progress(row)
            save(results)
        if not tuning.stopped:
            programs = _programs(tuning.arch).values()
            tuning.boxes += _boxes(times, programs, wrong, hysteresis)
            tuning.boxes_of[MASKED] = list(_boxes(times, programs, wrong, hysteresis, wrong_by=8))
    except KeyboardInterrupt:
        tuning.stopped = "interrupted"
    except GpuLostError as error:
        tuning.stopped, tuning.lost = str(error), True
    except ValueError as error:
        tuning.problems.append(f"no routes, {error}")
    return tuning


def k_sides(limits: Iterable[int | None]) -> list[Side]:
    """The axis k in pieces whose values the same programs serve, ascending: routes are chosen for each apart."""
    (axis,) = (axis for axis in _runtime.operator(OPERATOR).axes if axis.keys == ("k",))
    ends = sorted({limit for limit in limits if limit is not None and limit < axis.last})
    return list(zip((axis.first, *(end + axis.step for end in ends)), (*ends, axis.last), strict=True))


def _boxes(
    times: Mapping[Side, Times], programs: Iterable[Program], wrong: set[str], hysteresis: float, wrong_by: int = 1
) -> Iterator[Box]:
    """Routes for each piece of the axis k that a measured shape lies in, a box for each arm's part of most_rows. Other
    k of a piece get the same routes: of a small k, those of Kimi's 256.

    All of one main loop, the faster one, so that a row's bits do not change with the number of rows. Where fewer rows
    are expected than an arm is for, the arm serves that is never far from the best one, however many of the possible
    rows there are: wrong expectations then cost least. Only there do programs run that hold several tiles.

    wrong_by: by what expectations may be too high where most_rows says nothing, as of slabs, most of which are empty:
    an arm then serves from the first expectation on of which such a part still suits it.
    """
    named = {program.arm: program for program in programs}
    kept = _of_the_fastest_loop(
        times, {arm: str(program.constants["loop"]) for arm, program in named.items() if arm not in wrong}
    )
    several = {arm for arm, program in named.items() if "low_mean" in program.constants}
    for side, sizes in times.items():
        right = {rows: {arm: us for arm, us in arms.items() if arm in kept} for rows, arms in sizes.items()}
        single = {rows: {arm: us for arm, us in arms.items() if arm not in several} for rows, arms in right.items()}
        for first, last, arm in intervals(single, hysteresis):
            possible = {rows: arms for rows, arms in right.items() if rows <= last}
            guard, start = _steadiest(possible, arm), first
            if wrong_by > 1:
                start = max(first, wrong_by * _suited_from(possible, arm))
            table = [Interval(0, MAX_EXPERT_ROWS, arm)]
            if start > 0 and guard != arm:
                table = [Interval(0, start - 1, guard), Interval(start, MAX_EXPERT_ROWS, arm)]
            yield Box({"k": side, "most_rows": (first, last)}, {}, table)


def _of_the_fastest_loop(times: Mapping[Side, Times], loops: Mapping[str, str]) -> set[str]:
    """The arms of the main loop whose best ones take the least time over all sizes, of those that ran at every size."""
    best: dict[str, list[float]] = {loop: [] for loop in sorted(set(loops.values()))}
    measured = [means for sizes in times.values() for means in _means(sizes).values()]
    for loop, found in best.items():
        for means in measured:
            of_loop = [us for arm, us in means.items() if loops.get(arm) == loop]
            found += [min(of_loop)] if of_loop else []
    whole = [loop for loop, found in best.items() if found and len(found) == len(measured)]
    fastest = min(whole, key=lambda loop: geometric_mean(best[loop]), default=None)
    return {arm for arm, loop in loops.items() if fastest in (None, loop)}


def _steadiest(times: Times, arm: str) -> str:
    """The arm that at its worst size is the least slower than the best one, of those that ran at every size. `arm`
    unless another is better.
    """
    means = _means(times).values()
    everywhere = sorted(set.intersection(*map(set, means))) if means else []
    worst = {name: max(found[name] / min(found.values()) for found in means) for name in everywhere}
    return min(everywhere, key=lambda name: (worst[name], name != arm), default=arm)


def _suited_from(times: Times, arm: str) -> int:
    """From how many rows on the arm is nowhere slower than the best one by more than SUITS: 0, or a measured size. The
    last one if it is slow there, too.
    """
    found = _means(times)
    sizes = sorted(found)
    slow = [
        place for place, rows in enumerate(sizes) if found[rows].get(arm, math.inf) > SUITS * min(found[rows].values())
    ]
    return sizes[min(slow[-1] + 1, len(sizes) - 1)] if slow else 0


def _means(times: Times) -> dict[int, dict[str, float]]:
    """By rows and arm: over the shapes, of arms that ran on all of them. Sizes without any are left out."""
    shapes = max((len(values) for arms in times.values() for values in arms.values()), default=0)
    found = {
        rows: {arm: geometric_mean(us) for arm, us in arms.items() if len(us) == shapes} for rows, arms in times.items()
    }
    return {rows: means for rows, means in found.items() if means}


def _programs(arch: str) -> Mapping[str, Program]:
    found, few = _runtime.registry().programs(OPERATOR, arch), few_arms(arch)
    return {name: program for name, program in found.items() if program.arm not in few}


def _sweep(
    expert_rows: Sequence[int], timer: EventTimer, samples: int, budget: Budget, tuning: Tuning, wrong: set[str]
) -> Iterator[tuple[int, dict[str, Row]]]:
    """(k, rows by arm) for each size of each shape. An arm once wrong joins `wrong` and is not run again."""
    for scenario in SCENARIOS:
        for proj, shape in SHAPES[scenario].items():
            weights = make_weights(shape)
            for rows in expert_rows:
                if budget.spent():
                    tuning.stopped = "the time limit is over"
                    return
                cell = Cell(scenario, proj, tokens_for(rows, shape.experts))
                try:
                    yield shape.k, _measure(cell, rows, weights, timer, samples, wrong, tuning.problems)
                except TimelineError as error:
                    tuning.problems.append(f"{cell} is left out: {error}")
            del weights  # before the next ones are made: both need not fit


def tokens_for(expert_rows: int, experts: int) -> int:
    """Tokens that give an expert so many rows on average."""
    return max(1, expert_rows * experts // TOP_K)


def intervals(times: Times, hysteresis: float) -> list[Interval]:
    """Routes over all rows of an expert: by the geometric mean over the shapes, of arms that ran on all of them."""
    return choose(_means(times), {}, first=0, last=MAX_EXPERT_ROWS, limits={}, hysteresis=hysteresis)


def _measure(
    cell: Cell,
    rows: int,
    weights: Weights,
    timer: EventTimer,
    samples: int,
    wrong: set[str],
    problems: list[str],
) -> dict[str, Row]:
    """A row by arm, the arms in turn on one routing. Arms that turn out wrong join those that are not run."""
    work = draw_work(cell)
    arch = _runtime.architecture(work.x.device.index)
    programs = _programs(arch)
    calls: dict[str, Callable[[], object]] = {}
    right: dict[str, torch.Tensor] = {}
    for name, program in programs.items():
        if program.arm in wrong or not serves(program, cell.shape):
            continue
        loop = str(program.constants["loop"])
        ready = partial(_ready, work, weights, name, right.get(loop))
        prepared, problem = attempt(name, ready, torch.cuda.synchronize)
        if prepared is None:
            wrong.add(program.arm)
            problems.append(f"{program.arm} is left out from {cell} on: {problem}")
        else:
            calls[name] = prepared.launch
            right.setdefault(loop, prepared.out)
    found = {}
    for name, values in timer.measure(calls, samples).items() if calls else ():
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


def _ready(work: Work, weights: Weights, program: str, right: torch.Tensor | None) -> PreparedMoeW4A16:
    """A checked launch: by its bits where the output of a program with the same loop was right, else by the reference.

    Raises ValueError or RuntimeError for a wrong result.
    """
    if right is None:
        return checked_launch(work, weights, program)
    plan = route_plan(work.ids, work.shape.experts, BLOCK_M)
    prepared = prepare_moe_w4a16(work.x, weights.packed, plan, top_k=work.top_k, block_m=BLOCK_M, program=program)
    prepared.out.fill_(float("nan"))
    prepared()
    if not same_bits(prepared.out, right):
        raise ValueError(f"{program} is wrong: its bits differ from those of a program with the same loop")
    return prepared
