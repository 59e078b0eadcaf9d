"""Qualifying the present GPU: every program of an operator that it can run, on inputs that are hard for that program.

The outcome goes into a receipt: which GPU ran which checks against which cubin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
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


class Trial(NamedTuple):
    """A case that a program is run on: launched so many times, each number on outputs of its own; `graph`: once more
    by a graph's replay.
    """

    case: RouterCase
    settings: Settings
    launches: tuple[int, ...] = (1, 3)
    graph: bool = False


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
    with torch.cuda.device(device):
        for name, program in _runtime.registry().programs("fused_router", arch).items():
            if matches(name, only):
                trials = tiny_trials(program, counts, brief) if tiny else router_trials(program, place, counts)
                problems = [_run(trial, name, place) for trial in trials]
                build = program.builds[arch]
                found = list(chain.from_iterable(problems))
                verdicts.append(Verdict(name, arch, build.cubin_sha256, len(problems), found))
                progress(verdicts[-1])
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
        yield Trial(normal_case(tokens, experts, dtype, device), Settings(block_m), graph=graph)
        yield Trial(mixed_batch(tokens, experts, dtype, device), Settings(block_m, False, 2.5), graph=graph)
        settings = Settings(block_m, local_experts=local)
        yield Trial(normal_case(tokens, experts, dtype, device, seed=1), settings, graph=graph)
    limit = program.limit("num_tokens")
    if counts is None and program.num_tokens is None and limit is not None and limit <= EVERY_COUNT_TO:
        kinds = list(ADVERSARIES)
        for tokens in sorted({*range(1, limit + 1)}.difference(sizes)):
            case = adversarial_case(kinds[tokens % len(kinds)], tokens, experts, dtype, device)
            yield Trial(case, Settings(block_m, local_experts=local if tokens % 2 else None), launches=(1,))


def tiny_trials(program: Program, counts: tuple[int, ...] | None = None, brief: bool = False) -> Iterator[Trial]:
    """Two cases at a few counts, on the host: all experts, and a rank's own. Two launches use a workspace again.

    brief: one launch at the largest count, for a tool that looks at nothing that a launch leaves behind.
    """
    experts, dtype, block_m = _traits(program)
    host, launches = torch.device("cpu"), (1,) if brief else (2,)
    sizes = tiny_counts(program) if counts is None else _sizes(program, counts, 0)
    for tokens in sizes[-1:] if brief else sizes:
        yield Trial(mixed_batch(tokens, experts, dtype, host, biased=False), Settings(block_m), launches=launches)
        settings = Settings(block_m, False, 2.5, local_experts=range(experts // 8, experts // 4))
        yield Trial(normal_case(tokens, experts, dtype, host, seed=1), settings, launches=launches)


def tiny_counts(program: Program) -> list[int]:
    """No token or one, some, and the program's limit where that is small."""
    limit = program.limit("num_tokens")
    if program.num_tokens is None and limit is not None and limit <= TINY_LIMIT:
        return [0, limit // 2 + 1, limit]
    return _sizes(program, TINY_CHUNKS if limit is None else TINY_COUNTS[1:], 0)


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


def _run(trial: Trial, name: str, device: torch.device) -> list[str]:
    """Right however often it was launched on one workspace, and the same bits each time."""
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
        found = router_problems(case, settings, written)
        problems += [f"{case.name} {settings} {how}: {problem}" for problem in found]
    weights = [written.topk_weights for written in runs.values()]
    if not all(same_bits(weights[0], other) for other in weights[1:]):
        problems.append(f"{case.name} {settings}: the weights' bits change when launched again")
    return problems


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
    for tokens, (experts, top_k), block_m in product(sizes, ((48, 8), *SELECTIONS, (1024, 1)), blocks):
        problem: dict[str, int | str] = {"num_pairs": tokens * top_k, "block_m": block_m}
        if tiny:
            ids = expert_parallel_ids(tokens, top_k, experts, torch.device("cpu"), absent=0.5)
            for name in (name for name in sorted(wanted) if admits(programs[name], problem)):
                outcome = run_route_plan_from_host(ids, experts, block_m, device, name)
                found.setdefault(name, []).append(outcome)
        elif (name := registry.lookup("route_plan", arch, problem).program_name) in wanted:
            ids = expert_parallel_ids(tokens, top_k, experts, device, absent=0.5)
            found.setdefault(name, []).append(check_route_plan(ids, experts, block_m))
    return [
        Verdict(
            name, arch, programs[name].builds[arch].cubin_sha256, len(outcomes), list(chain.from_iterable(outcomes))
        )
        for name, outcomes in sorted(found.items())
    ]
