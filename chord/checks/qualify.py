"""Qualifying the present GPU: every program of an operator that it can run, on inputs that are hard for that program.

The outcome goes into a receipt: which GPU ran which checks against which cubin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

import torch

from chord import _runtime
from chord.checks.compare import same_bits
from chord.checks.inputs import ADVERSARIES, RouterCase, adversarial_case, expert_parallel_ids, mixed_batch, normal_case
from chord.checks.router import (
    Buffers,
    Settings,
    check_route_plan,
    differences,
    router_problems,
    run_from_host,
    run_graphed,
    run_prepared,
    run_route_plan_from_host,
)
from chord.registry.schema import Program
from chord.router.launch import admits
from chord.router.validate import SELECTIONS

ROUTER_COUNTS = (0, 1, 3, 5, 17, 33, 64, 100, 129, 300, 1025, 2049, 4097, 8192, 20_000)
TINY_COUNTS = (0, 1, 40)
"""Small enough for a sanitizer, which slows a kernel down a thousandfold."""
TINY_CHUNKS = (1, 130)
"""The same for a program without a limit, which takes rows in chunks."""
TINY_LIMIT = 64
"""The most tokens that tiny inputs have where a program's own limit is tried."""
EVERY_COUNT_TO = 32
"""A program for at most so many tokens is tried with each count that it admits."""
RUN_TIME_BLOCK_M = 40
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Verdict(NamedTuple):
    """What became of one program."""

    program: str
    arch: str
    cubin_sha256: str
    cases: int
    problems: list[str]
    seconds: float = 0.0
    """Of launching and judging it; inputs and exact results that it shares with others count in equal parts."""


class Trial(NamedTuple):
    """A case that a program is run on: launched so many times, each number on outputs of its own; `graph`: once more
    by a graph's replay.
    """

    case: RouterCase
    settings: Settings
    launches: tuple[int, ...] = (1, 3)
    graph: bool = False


class Seconds:
    """How long programs of a suite take that share inputs: each its own time, and equal parts of the rest."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._own: dict[str, float] = {}

    @contextmanager
    def of(self, program: str) -> Iterator[None]:
        """Inside, time is this program's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._own[program] = self._own.get(program, 0.0) + time.perf_counter() - start

    @property
    def all(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._start

    def shares(self, programs: Sequence[str]) -> dict[str, float]:
        """By program; together they are what the suite took."""
        rest = (self.all - sum(self._own.values())) / max(1, len(programs))
        return {name: self._own.get(name, 0.0) + rest for name in programs}


def qualify_router(
    device: int,
    *,
    tiny: bool = False,
    brief: bool = False,
    only: str = "*",
    counts: tuple[int, ...] | None = None,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Runs every fused_router program of the registry that was built for the device, then route_plan's.

    tiny: small inputs, made and judged on the host. brief: of those the fewest that run every part of a kernel. only:
    shell patterns, separated by commas, of which a program's name must match one. counts: of tokens, instead of
    ROUTER_COUNTS or what tiny_counts gives.
    """
    arch = _runtime.architecture(device)
    place = torch.device("cuda", device)
    verdicts = []
    known = _Known()
    with torch.cuda.device(device):
        for name, program in _runtime.registry().programs("fused_router", arch).items():
            if matches(name, only):
                clock = Seconds()
                trials = tiny_trials(program, counts, brief) if tiny else router_trials(program, place, counts)
                problems = [_run(trial, name, place, known) for trial in trials]
                build = program.builds[arch]
                found = list(chain.from_iterable(problems))
                verdicts.append(Verdict(name, arch, build.cubin_sha256, len(problems), found, clock.all))
                progress(verdicts[-1])
        _made.cache_clear()
        for verdict in _qualify_route_plan(arch, counts, place, only, tiny, brief):
            verdicts.append(verdict)
            progress(verdict)
    return verdicts


def matches(name: str, only: str) -> bool:
    """Whether a name matches one of some shell patterns, which commas separate."""
    return any(fnmatchcase(name, pattern) for pattern in only.split(","))


def router_trials(program: Program, device: torch.device, counts: tuple[int, ...] | None = None) -> Iterator[Trial]:
    """What one program is tried on, within what it admits: three cases at each of some counts, at one of them by a
    graph as well; for at most EVERY_COUNT_TO tokens one hostile case at each of the counts between.
    """
    experts, dtype, block_m = _traits(program)
    sizes = _sizes(program, ROUTER_COUNTS, None) if counts is None else _sizes(program, counts, 0)
    captured = max((size for size in sizes if size <= EVERY_COUNT_TO), default=min(sizes, default=-1))
    local = range(experts // 8, experts // 4)
    for tokens in sizes:
        graph = tokens == captured
        size = tokens, experts, dtype, device
        yield Trial(_made(normal_case, *size), Settings(block_m), graph=graph)
        yield Trial(_made(mixed_batch, *size), Settings(block_m, False, 2.5), graph=graph)
        yield Trial(_made(_another_case, *size), Settings(block_m, local_experts=local), graph=graph)
    limit = program.limit("num_tokens")
    if counts is None and program.num_tokens is None and limit is not None and limit <= EVERY_COUNT_TO:
        kinds = list(ADVERSARIES)
        for tokens in sorted({*range(1, limit + 1)}.difference(sizes)):
            case = _made(adversarial_case, tokens, experts, dtype, device, kinds[tokens % len(kinds)])
            yield Trial(case, Settings(block_m, local_experts=local if tokens % 2 else None), launches=(1,))


def tiny_trials(program: Program, counts: tuple[int, ...] | None = None, brief: bool = False) -> Iterator[Trial]:
    """Two cases at a few counts, on the host: all experts, and a rank's own. Two launches use a workspace again.

    brief: one launch at the largest count, for a tool that looks at nothing that a launch leaves behind.
    """
    experts, dtype, block_m = _traits(program)
    host, launches = torch.device("cpu"), (1,) if brief else (2,)
    sizes = tiny_counts(program) if counts is None else _sizes(program, counts, 0)
    for tokens in sizes[-1:] if brief else sizes:
        yield Trial(_made(_unbiased_batch, tokens, experts, dtype, host), Settings(block_m), launches=launches)
        settings = Settings(block_m, False, 2.5, local_experts=range(experts // 8, experts // 4))
        yield Trial(_made(_another_case, tokens, experts, dtype, host), settings, launches=launches)


def tiny_counts(program: Program) -> list[int]:
    """No token or one, some, and the program's limit where that is small."""
    limit = program.limit("num_tokens")
    if program.num_tokens is None and limit is not None and limit <= TINY_LIMIT:
        return [0, limit // 2 + 1, limit]
    return _sizes(program, TINY_CHUNKS if limit is None else TINY_COUNTS[1:], 0)


def _unbiased_batch(tokens: int, experts: int, dtype: torch.dtype, device: torch.device) -> RouterCase:
    return mixed_batch(tokens, experts, dtype, device, biased=False)


def _another_case(tokens: int, experts: int, dtype: torch.dtype, device: torch.device) -> RouterCase:
    return normal_case(tokens, experts, dtype, device, seed=1)


def _traits(program: Program) -> tuple[int, torch.dtype, int]:
    """(experts, type of the logits, block_m to try)."""
    constants = program.constants
    return int(constants["num_experts"]), _DTYPES[str(constants["logits"])], program.block_m or RUN_TIME_BLOCK_M


def _sizes(program: Program, counts: tuple[int, ...], limit_to: int | None) -> list[int]:
    """Counts that a program admits. Its limit is one of them if it is at most limit_to (None: whatever it is)."""
    if program.num_tokens is not None:
        return [program.num_tokens]
    limit = program.limit("num_tokens")
    if limit is None:
        return sorted({*counts})
    own = {limit} if limit_to is None or limit <= limit_to else set()
    return sorted(count for count in {*counts, *own} if count <= limit)


class _Known:
    """Outputs that were right, by case and settings, so that the programs which share those are compared by bits."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, Settings], tuple[RouterCase, Buffers]] = {}

    def of(self, trial: Trial) -> Buffers | None:
        found = self._right.get((id(trial.case.logits), trial.settings))
        return found and found[1]

    def add(self, trial: Trial, right: Buffers) -> None:
        """It keeps the case, whose identity is the key."""
        self._right[id(trial.case.logits), trial.settings] = trial.case, right


def _run(trial: Trial, name: str, device: torch.device, known: _Known) -> list[str]:
    """Right however often it was launched on one workspace, and the same bits each time.

    Outputs with the bits of some that were right are right; the others are held against the reference.
    """
    case, settings = trial.case, trial.settings
    runs: dict[str, Buffers] = {}
    for launches in trial.launches:
        if case.logits.device.type == "cpu":
            runs[f"launched {launches} times"] = run_from_host(case, settings, device, name, launches)
        else:
            runs[f"launched {launches} times"] = run_prepared(case, settings, name, launches)
    if trial.graph:
        runs["in a graph"] = run_graphed(case, settings, name)
    problems = []
    for how, written in runs.items():
        right = known.of(trial)
        if right is not None and not differences(written, right):
            continue
        found = router_problems(case, settings, written)
        problems += [f"{case.name} {settings} {how}: {problem}" for problem in found]
        if right is None and not found:
            known.add(trial, written)
    weights = [written.topk_weights for written in runs.values()]
    if not all(same_bits(weights[0], other) for other in weights[1:]):
        problems.append(f"{case.name} {settings}: the weights' bits change when launched again")
    return problems


@lru_cache(maxsize=1024)
def _made(
    make: Callable[..., RouterCase], tokens: int, experts: int, dtype: torch.dtype, device: torch.device, *more: object
) -> RouterCase:
    """A case that programs share."""
    return make(*more, tokens, experts, dtype, device)


def _qualify_route_plan(
    arch: str, counts: tuple[int, ...] | None, device: torch.device, only: str, tiny: bool, brief: bool
) -> list[Verdict]:
    """The plan's programs as they are routed: each size runs the one that serves it. Tiny: each that admits it."""
    registry = _runtime.registry()
    if "route_plan" not in registry.manifest.operators:
        return []
    programs = registry.programs("route_plan", arch)
    wanted = {name for name in programs if matches(name, only) or matches("route_plan", only)}
    sizes = counts if counts is not None else TINY_COUNTS if tiny else ROUTER_COUNTS
    sizes = sizes[-1:] if brief else sizes
    blocks = (8,) if tiny else (8, 16, RUN_TIME_BLOCK_M)
    found: dict[str, list[list[str]]] = {}
    clock = Seconds()
    for tokens, (experts, top_k), block_m in product(sizes, ((48, 8), *SELECTIONS, (1024, 1)), blocks):
        problem: dict[str, int | str] = {"num_pairs": tokens * top_k, "block_m": block_m}
        if tiny:
            ids = expert_parallel_ids(tokens, top_k, experts, torch.device("cpu"), absent=0.5)
            for name in (name for name in sorted(wanted) if admits(programs[name], problem)):
                with clock.of(name):
                    outcome = run_route_plan_from_host(ids, experts, block_m, device, name)
                found.setdefault(name, []).append(outcome)
        elif (name := registry.lookup("route_plan", arch, problem).program_name) in wanted:
            ids = expert_parallel_ids(tokens, top_k, experts, device, absent=0.5)
            with clock.of(name):
                found.setdefault(name, []).append(check_route_plan(ids, experts, block_m))
    return verdicts_of(found, programs, arch, clock)


def verdicts_of(
    found: Mapping[str, list[list[str]]], programs: Mapping[str, Program], arch: str, clock: Seconds
) -> list[Verdict]:
    """From each program's problems by case, sorted by name. The clock ran from the suite's beginning."""
    seconds = clock.shares(list(found))
    return [
        Verdict(name, arch, programs[name].builds[arch].cubin_sha256, len(cases), [*chain(*cases)], seconds[name])
        for name, cases in sorted(found.items())
    ]
