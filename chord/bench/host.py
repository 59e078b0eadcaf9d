"""Host time of launches: a bare driver call, a prepared launch, the eager operator, a process's first call, and first
launches after preload.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from chord import _runtime
from chord.bench import preloaded
from chord.bench.results import Results, Row, describe_run, recorder
from chord.bench.stats import summarize
from chord.checks.inputs import SELECTIONS, normal_case
from chord.checks.w4a16 import gemm_case
from chord.registry import PreparedLaunch
from chord.router import (
    PreparedFusedRouter,
    RoutePlan,
    allocate_route_plan,
    fused_router,
    prepare_fused_router,
)
from chord.router import launch as router_launch
from chord.router.experts import resolve_local_experts
from chord.router.ops import empty_results
from chord.router.plan import empty_route_plan
from chord.router.validate import (
    LOGITS_DTYPES,
    check_dense,
    check_experts,
    check_memory,
    check_router_inputs,
    check_settings,
    check_tensor,
)
from chord.w4a16 import PreparedMoeW4A16, WeightShape, moe_w4a16, prepare_moe_w4a16
from chord.w4a16.api import ClearedFirst

AnyPrepared = PreparedFusedRouter | PreparedMoeW4A16

METHOD = (
    "host clock around each call, bare driver call and prepared launch in turn; eager calls one after the other,"
    " and what they do part by part (checks, buffers, launch): the rest of them is torch's dispatcher;"
    " first call: fresh process with CUDA up, until the result is there; preloaded: fresh processes in which every"
    " program is loaded, a launch after 50 ms without any, or after 20 of another program"
)
FIRST_CALL_CODE = """
import json, time, torch
logits = torch.randn({tokens}, {experts}, device="cuda")
bias = torch.zeros({experts}, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
import chord
route = chord.fused_router
imported = time.perf_counter()
output = route(logits, bias, top_k={top_k}, block_m=8)
torch.cuda.synchronize()
done = time.perf_counter()
route(logits, bias, top_k={top_k}, block_m=8)
with open("/proc/self/maps") as maps:
    compiler = any("nvrtc" in line or "nvJitLink" in line for line in maps)
print(json.dumps(dict(import_us=(imported - start) * 1e6, call_us=(done - imported) * 1e6, compiler=compiler)))
"""


class LaunchTimes(NamedTuple):
    """Medians in microseconds, measured in turn."""

    bare_us: float
    prepared_us: float
    bare_samples: list[float]
    prepared_samples: list[float]


class FirstCall(NamedTuple):
    """The first router call of a process in which CUDA is up."""

    import_us: float
    """Importing chord's operators, torch being imported."""
    call_us: float
    """Open, look up, verify, load, launch, wait."""
    compiler: bool
    """Whether a compiler library is mapped into the process (torch itself may map one)."""


def bare_launch(prepared: AnyPrepared) -> Callable[[], object]:
    """The same launch without chord's code: cuLaunchKernelEx on ready-made configurations of the current stream.

    What clears its output first does so here, too: torch does that. Raises TypeError where no kernel is launched.
    """
    launch: object = prepared.launch
    if not isinstance(launch, ClearedFirst):
        return _driver_calls(launch, prepared.program)
    clear, behind = launch.rows.zero_, _driver_calls(launch.launched, prepared.program)

    def cleared() -> None:
        clear()
        behind()

    return cleared


def _driver_calls(launch: object, program: str) -> Callable[[], object]:
    if not isinstance(launch, PreparedLaunch):
        raise TypeError(f"prepared: expected a launch of kernels on a GPU, got one of {program or 'nothing'}")
    call, calls = launch.driver_calls(_runtime.raw_stream(torch.cuda.current_device()))
    if len(calls) == 1:
        config, function, parameters, extra = calls[0]
        return lambda: call(config, function, parameters, extra)

    def several() -> None:
        for config, function, parameters, extra in calls:
            call(config, function, parameters, extra)

    return several


def launch_times(prepared: AnyPrepared, launches: int = 10_000) -> LaunchTimes:
    """Times `launches` bare and prepared launches in turn. The GPU keeps up: a launch costs it less than the host."""
    bare = bare_launch(prepared)
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(200):
        bare()
        prepared()
    torch.cuda.synchronize()
    clock = time.perf_counter_ns
    for turn in range(launches):
        start = clock()
        bare()
        middle = clock()
        prepared()
        end = clock()
        samples[0].append((middle - start) / 1e3)
        samples[1].append((end - middle) / 1e3)
        if turn % 256 == 255:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return LaunchTimes(summarize(samples[0]).median, summarize(samples[1]).median, *samples)


def call_times(call: Callable[[], object], calls: int = 2000) -> list[float]:
    """Microseconds of host time of each call."""
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    samples = []
    for turn in range(calls):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
        if turn % 256 == 255:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return samples


def eager_parts(logits: torch.Tensor, bias: torch.Tensor, top_k: int, block_m: int) -> dict[str, Callable[[], object]]:
    """What `chord.fused_router` does itself in a call on these tensors, by name: a profile of its host time.

    checks: all that is asked of the arguments; buffers: the outputs' allocation; launch: from the kernel's look-up on.
    """
    experts, device = logits.shape[1], logits.device

    def check() -> None:
        check_settings(top_k, block_m, True, 1.0)
        check_tensor("logits", logits, LOGITS_DTYPES, (None, None))
        check_dense("bias", bias)
        expert_map, num_local = resolve_local_experts(None, experts, device)
        check_router_inputs(logits, bias, top_k, block_m)
        check_experts(expert_map, experts, num_local)
        check_memory({"logits": logits, "bias": bias}, {})

    def allocate() -> tuple[torch.Tensor, torch.Tensor, RoutePlan]:
        return *empty_results(logits, top_k), empty_route_plan(logits.shape[0], top_k, experts, block_m, device)

    run = partial(router_launch.fused_router, logits, bias, block_m, True, 1.0, None, *allocate())
    return {"checks": check, "buffers": allocate, "launch": run}


def first_call(tokens: int, num_experts: int = 896, top_k: int = 16) -> FirstCall:
    """Runs a fresh Python process. Raises RuntimeError with its output when it fails."""
    code = FIRST_CALL_CODE.format(tokens=tokens, experts=num_experts, top_k=top_k)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own code
    if done.returncode:
        raise RuntimeError(f"the first-call process failed:\n{done.stderr}")
    return FirstCall(**json.loads(done.stdout.splitlines()[-1]))


def run(
    *,
    launches: int = 10_000,
    processes: int = 3,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """The "host" suite on the current GPU: one row per way to launch and token count, after each of which progress and
    save are called. The rows of fresh processes, one after the other, come last: `processes` for a first call, and
    after preload at most two, which take many samples each.
    """
    results = describe_run("host", METHOD, "none", 0, {}, commit)
    record = recorder(results, progress, save)

    def add(scenario: str, tokens: int, program: str, samples: list[float]) -> None:
        summary = summarize(samples)
        record(
            Row(
                scenario=scenario,
                tokens=tokens,
                block_m=8,
                program=program,
                samples=summary.samples,
                us=summary.median,
                p10=summary.p10,
                p90=summary.p90,
            )
        )

    for tokens in (1, 16, 300, 2048):
        _add_launches(tokens, launches, add)
    _add_w4a16_launches(launches, add)
    firsts = [first_call(1) for _ in range(processes)]
    add("first_call", 1, "", [first.call_us for first in firsts])
    add("import", 1, "", [first.import_us for first in firsts])
    for operator, tokens in preloaded.OPERATORS.items():
        _add_preloaded(operator, tokens, min(2, processes), add)
    return results


def _add_preloaded(
    operator: str, tokens: int, processes: int, add: Callable[[str, int, str, list[float]], None]
) -> None:
    found = preloaded.in_fresh_processes(operator, processes)
    name = "preloaded" if operator == "fused_router" else "w4a16_preloaded"
    others = [times for process in found for times in process.programs.values()]
    add(f"{name}_first_after_pause", tokens, "", [process.first_after_pause_us for process in found])
    add(f"{name}_used_after_pause", tokens, "", [process.used_after_pause_us for process in found])
    add(f"{name}_first_among_others", tokens, "", [first for first, _ in others])
    add(f"{name}_steady", tokens, "", [steady for _, steady in others])


def _add_launches(tokens: int, launches: int, add: Callable[[str, int, str, list[float]], None]) -> None:
    experts, top_k = SELECTIONS[0]
    device = torch.device("cuda", torch.cuda.current_device())
    case = normal_case(tokens, experts, torch.float32, device)
    prepared = prepare_fused_router(case.logits, case.bias, top_k=top_k, block_m=8)
    prepared()
    times = launch_times(prepared, launches)
    plan = allocate_route_plan(tokens, top_k=top_k, num_experts=experts, block_m=8, device=device)
    add("bare_launch", tokens, prepared.program, times.bare_samples)
    add("prepared", tokens, prepared.program, times.prepared_samples)
    for scenario, own in (("eager", None), ("eager_own_plan", plan)):
        call = partial(fused_router, case.logits, case.bias, top_k=top_k, block_m=8, plan=own)
        add(scenario, tokens, prepared.program, call_times(call))
    for part, run in eager_parts(case.logits, case.bias, top_k, 8).items():
        add(f"eager_{part}", tokens, prepared.program, call_times(run))


def _add_w4a16_launches(launches: int, add: Callable[[str, int, str, list[float]], None]) -> None:
    """A GEMM so small that the GPU keeps up with the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    case = gemm_case(WeightShape(8, 256, 256), 4, 2, 8, "random", device)
    arguments = (case.x, case.packed, case.plan)
    prepared = prepare_moe_w4a16(*arguments, top_k=2, block_m=8)
    prepared()
    times = launch_times(prepared, launches)
    add("w4a16_bare_launch", 4, prepared.program, times.bare_samples)
    add("w4a16_prepared", 4, prepared.program, times.prepared_samples)
    call = partial(moe_w4a16, *arguments, top_k=2, block_m=8, out=prepared.out)
    add("w4a16_eager_own_output", 4, prepared.program, call_times(call))
