"""Qualifying the present GPU: every program of an operator that it can run, on inputs that are hard for that program.

The outcome goes into a receipt: which GPU ran which checks against which cubin.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

import torch

from chord import _runtime
from chord.checks.compare import same_bits
from chord.checks.inputs import RouterCase, expert_parallel_ids, mixed_batch, normal_case
from chord.checks.router import Settings, check_route_plan, on_host, router_problems, run_prepared
from chord.registry.schema import Program
from chord.router.validate import SELECTIONS

ROUTER_COUNTS = (0, 1, 3, 5, 17, 33, 64, 100, 129, 300, 1025, 2049, 4097, 8192, 20_000)
TINY_COUNTS = (0, 1, 2, 3, 5, 17, 40)
"""Small enough for a sanitizer, which slows a kernel down a thousandfold."""
RUN_TIME_BLOCK_M = 40
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Verdict(NamedTuple):
    """What became of one program."""

    program: str
    arch: str
    cubin_sha256: str
    cases: int
    problems: list[str]


def qualify_router(
    device: int,
    *,
    tiny: bool = False,
    only: str = "*",
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Runs every fused_router program of the registry that was built for the device, then route_plan's.

    tiny: small inputs, judged on the host. only: a shell pattern that a program's name must match.
    """
    arch = _runtime.architecture(device)
    counts = TINY_COUNTS if tiny else ROUTER_COUNTS
    place = torch.device("cuda", device)
    verdicts = []
    with torch.cuda.device(device):
        for name, program in _runtime.registry().programs("fused_router", arch).items():
            if fnmatchcase(name, only):
                problems = [_check_case(*inputs, name, tiny) for inputs in router_cases(program, counts, place)]
                build = program.builds[arch]
                found = list(chain.from_iterable(problems))
                verdicts.append(Verdict(name, arch, build.cubin_sha256, len(problems), found))
                progress(verdicts[-1])
        if fnmatchcase("route_plan", only):
            verdicts += _qualify_route_plan(arch, counts, place, progress)
    return verdicts


def router_cases(
    program: Program, counts: tuple[int, ...], device: torch.device
) -> Iterator[tuple[RouterCase, Settings]]:
    """Inputs and settings for one program, within what it admits."""
    constants = program.constants
    experts = int(constants["num_experts"])
    dtype = _DTYPES[str(constants["logits"])]
    block_m = program.block_m or RUN_TIME_BLOCK_M
    limit = program.limit("num_tokens")
    if limit is None:
        limit = max(counts, default=0)
    sizes = [program.num_tokens] if program.num_tokens is not None else [n for n in {*counts, limit} if n <= limit]
    for tokens in sorted(sizes):
        yield normal_case(tokens, experts, dtype, device), Settings(block_m)
        yield mixed_batch(tokens, experts, dtype, device), Settings(block_m, False, 2.5)
        local = range(experts // 8, experts // 4)
        yield normal_case(tokens, experts, dtype, device, seed=1), Settings(block_m, local_experts=local)


def receipt(verdicts: list[Verdict], digest: str, device: int) -> dict[str, object]:
    """A JSON-able record. digest: of the manifest whose cubins were run."""
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name(device),
        "arch": _runtime.architecture(device),
        "manifest_sha256": digest,
        "programs": {
            verdict.program: {
                "cubin_sha256": verdict.cubin_sha256,
                "cases": verdict.cases,
                "passed": not verdict.problems,
            }
            for verdict in verdicts
        },
    }


def _check_case(case: RouterCase, settings: Settings, name: str, host: bool) -> list[str]:
    """Right when launched once, and the same bits when launched three times on one workspace."""
    problems, weights = [], []
    for launches in (1, 3):
        judged = case, settings, run_prepared(case, settings, name, launches)
        if host:
            judged = on_host(*judged)
        found = router_problems(*judged)
        problems += [f"{case.name} {settings} launched {launches} times: {problem}" for problem in found]
        weights.append(judged[2].topk_weights)
    if not same_bits(*weights):
        problems.append(f"{case.name} {settings}: the weights' bits change when launched again")
    return problems


def _qualify_route_plan(
    arch: str, counts: tuple[int, ...], device: torch.device, progress: Callable[[Verdict], None]
) -> list[Verdict]:
    """The plan's programs as they are routed: each size runs the one that serves it."""
    registry = _runtime.registry()
    if "route_plan" not in registry.manifest.operators:
        return []
    found: dict[str, list[list[str]]] = {}
    for tokens in counts:
        for experts, top_k in ((48, 8), *SELECTIONS, (1024, 1)):
            for block_m in (8, 16, RUN_TIME_BLOCK_M):
                ids = expert_parallel_ids(tokens, top_k, experts, device, absent=0.5)
                problem = {"num_pairs": ids.numel(), "block_m": block_m}
                name = registry.lookup("route_plan", arch, problem).program_name
                found.setdefault(name, []).append(check_route_plan(ids, experts, block_m))
    programs = registry.programs("route_plan", arch)
    verdicts = []
    for name, outcomes in sorted(found.items()):
        problems = [problem for outcome in outcomes for problem in outcome]
        verdicts.append(Verdict(name, arch, programs[name].builds[arch].cubin_sha256, len(outcomes), problems))
        progress(verdicts[-1])
    return verdicts
