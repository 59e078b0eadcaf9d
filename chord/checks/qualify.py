"""Qualifying the present GPU: every program of an operator that it can run, on inputs that are hard for that program.

The outcome goes into a receipt: which GPU ran which checks against which cubin.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from chord.checks.compare import same_bits
from chord.checks.inputs import RouterCase, expert_parallel_ids, mixed_batch, normal_case
from chord.checks.router import Settings, check_route_plan, check_router, router_problems, run_prepared
from chord.registry.schema import Program
from chord.router import launch
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
    device: int, counts: tuple[int, ...] = ROUTER_COUNTS, progress: Callable[[Verdict], None] = lambda verdict: None
) -> list[Verdict]:
    """Runs every fused_router program of the registry that was built for the device, then route_plan's."""
    arch = launch.architecture(device)
    verdicts = []
    with torch.cuda.device(device):
        for name, program in launch.registry().programs("fused_router", arch).items():
            problems: list[str] = []
            cases = 0
            for case, settings in router_cases(program, counts, torch.device("cuda", device)):
                problems += check_router(case, settings, name) + _repeats(case, settings, name)
                cases += 1
            verdicts.append(Verdict(name, arch, program.builds[arch].cubin_sha256, cases, problems))
            progress(verdicts[-1])
        verdicts += _qualify_route_plan(arch, counts, torch.device("cuda", device), progress)
    return verdicts


def router_cases(
    program: Program, counts: tuple[int, ...], device: torch.device
) -> Iterator[tuple[RouterCase, Settings]]:
    """Inputs and settings for one program, within what it admits."""
    constants = program.constants
    experts = int(constants["num_experts"])
    dtype = _DTYPES[str(constants["logits"])]
    block_m = program.block_m or RUN_TIME_BLOCK_M
    limit = int(constants.get("max_tokens", max(counts, default=0)))
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
        "arch": launch.architecture(device),
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


def _repeats(case: RouterCase, settings: Settings, name: str) -> list[str]:
    """Launching three times on one workspace gives the same bits as launching once."""
    once, thrice = run_prepared(case, settings, name), run_prepared(case, settings, name, launches=3)
    problems = router_problems(case, settings, thrice)
    if not same_bits(once.topk_weights, thrice.topk_weights):
        problems.append(f"{case.name} {name}: weights change when launched again")
    return problems


def _qualify_route_plan(
    arch: str, counts: tuple[int, ...], device: torch.device, progress: Callable[[Verdict], None]
) -> list[Verdict]:
    """The plan's programs as they are routed: each size runs the one that serves it."""
    registry = launch.registry()
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
