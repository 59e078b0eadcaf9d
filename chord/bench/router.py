"""The fused router beside its peers: all measured cells, the sizes between them, Kimi K2, and expert-parallel plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from chord import _runtime
from chord.bench.peers import SglangRouter, torch_align, torch_route
from chord.bench.results import Results, Row, cubin_of, describe_run, recorder
from chord.bench.stats import summarize
from chord.bench.timing import ColdTimer, Subject
from chord.checks.graphs import graphed
from chord.checks.inputs import SPECIAL_BLOCK_M, TOKEN_COUNTS, RouterCase, normal_case
from chord.checks.router import Settings, poisoned_buffers, prepared_on, router_problems

EXTRA_TOKEN_COUNTS = (3, 100, 300, 1000, 3000, 6000)
PARALLEL_TOKEN_COUNTS = (1, 16, 64, 256, 1024, 4096, 8192)
METHOD = (
    "GPU timeline of the profiler, cold L2 (256 MB read before every call), subjects in turn on a warm board;"
    " chord: CUDA graph replay, first kernel's start to last kernel's end; peers: sum of kernel durations without gaps"
)


class Cell(NamedTuple):
    """One row to be measured."""

    scenario: str
    num_experts: int
    tokens: int
    block_m: int
    local_experts: range | None = None
    dtype: torch.dtype = torch.float32


def cells(scenarios: Iterable[str] | None = None) -> list[Cell]:
    """All cells of the suite, or those of the named scenarios: k3, k2, k3_bf16, k3_ep8, k2_ep8."""
    every = sorted({*TOKEN_COUNTS, *EXTRA_TOKEN_COUNTS})
    plan = [
        *(Cell("k3", 896, tokens, block_m) for block_m in SPECIAL_BLOCK_M for tokens in every),
        *(Cell("k2", 384, tokens, block_m) for block_m in SPECIAL_BLOCK_M for tokens in every),
        *(Cell("k3_bf16", 896, tokens, 8, None, torch.bfloat16) for tokens in PARALLEL_TOKEN_COUNTS),
        *(Cell("k3_ep8", 896, tokens, 8, range(112, 224)) for tokens in PARALLEL_TOKEN_COUNTS),
        *(Cell("k2_ep8", 384, tokens, 8, range(48, 96)) for tokens in PARALLEL_TOKEN_COUNTS),
    ]
    wanted = None if scenarios is None else set(scenarios)
    known = {cell.scenario for cell in plan}
    if wanted is not None and not wanted <= known:
        raise ValueError(f"scenarios: expected some of {sorted(known)}, got {sorted(wanted - known)}")
    return [cell for cell in plan if wanted is None or cell.scenario in wanted]


def run(
    peers: Path | None = None,
    *,
    scenarios: Iterable[str] | None = None,
    samples: int = 101,
    steady_ms: int = 200,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measures the suite on the current GPU. peers: folder with SGLang's kernels; without it torch alone is the peer.

    progress and save are called after each row. Raises RuntimeError when a kernel's result is wrong: a wrong kernel has
    no time.
    """
    sglang = None if peers is None else SglangRouter(peers)
    versions = {"torch": str(torch.__version__)}
    if sglang is not None:
        versions["sglang"] = sglang.version
    results = describe_run("router", METHOD, "read", steady_ms, versions, commit)
    add, timer = recorder(results, progress, save), ColdTimer(steady_ms)
    for cell in cells(scenarios):
        add(measure_cell(cell, timer, sglang, samples))
    return results


def measure_cell(cell: Cell, timer: ColdTimer, sglang: SglangRouter | None, samples: int) -> Row:
    """One row: the routed program and the peers that serve the same work."""
    case = cell_case(cell)
    settings = Settings(cell.block_m, local_experts=cell.local_experts)
    call, name = checked_launch(case, settings)
    program = _runtime.operator("fused_router").programs[name]
    subjects = {"chord": Subject(graphed(call), "span", len(program.kernels)), **_peers(cell, case, sglang)}
    times = {who: summarize(values) for who, values in timer.measure(subjects, samples).items()}
    ours = times.pop("chord")
    return Row(
        scenario=cell.scenario,
        tokens=cell.tokens,
        block_m=cell.block_m,
        program=name,
        cubin_sha256=cubin_of(name, case.logits.device),
        samples=samples,
        us=ours.median,
        p10=ours.p10,
        p90=ours.p90,
        peers={name: summary.median for name, summary in times.items()},
    )


def cell_case(cell: Cell) -> RouterCase:
    """The inputs of a cell: the same draw for chord and for its peers."""
    device = torch.device("cuda", torch.cuda.current_device())
    return normal_case(cell.tokens, cell.num_experts, cell.dtype, device, seed=cell.block_m)


def checked_launch(case: RouterCase, settings: Settings) -> tuple[Callable[[], object], str]:
    """(prepared launch, its program's name), after its result was compared with the reference."""
    buffers = poisoned_buffers(case, settings)
    prepared = prepared_on(case, settings, buffers)
    prepared()
    problems = router_problems(case, settings, buffers)
    if problems:
        raise RuntimeError(f"{prepared.program} is wrong, so it is not timed: {'; '.join(problems[:3])}")
    return prepared, prepared.program


def _peers(cell: Cell, case: RouterCase, sglang: SglangRouter | None) -> dict[str, Subject]:
    """Peers that do the whole work, by name: SGLang where it serves the shape; for K2 also torch's selection."""
    if cell.local_experts is not None:
        return {}
    subjects = {}
    shape = cell.num_experts, cell.block_m
    if sglang is not None:
        routed = _working(sglang.route(case))
        if routed is not None:
            subjects["sglang"] = _both(routed, sglang.align(routed[1], *shape))
    if cell.scenario == "k2":
        chosen = torch_route(case)
        subjects["torch"] = _both(chosen, torch_align(chosen[1], *shape))
        if sglang is not None:
            subjects["torch_sglang_align"] = _both(chosen, sglang.align(chosen[1], *shape))
    return subjects


def _working(routed: tuple[Callable[[], None], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor] | None:
    """The peer's selection, or None when it refuses the shape."""
    try:
        routed[0]()
    except Exception:
        return None
    return routed


def _both(routed: tuple[Callable[[], None], torch.Tensor], align: Callable[[], None]) -> Subject:
    def call() -> None:
        routed[0]()
        align()

    return Subject(call, "sum")
