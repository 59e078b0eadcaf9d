"""Running the router on poisoned buffers and comparing everything that it wrote, and everything that it must not
write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from chord import _runtime
from chord.checks.compare import POISON, check_ids, check_plan, check_weights, differing, poison, poisoned_plan
from chord.checks.graphs import graphed
from chord.checks.inputs import RouterCase
from chord.router import (
    PreparedFusedRouter,
    RoutePlan,
    fused_router,
    launch,
    max_route_blocks,
    prepare_fused_router,
    route_plan,
    workspaces,
)
from chord.router.experts import resolve_local_experts
from chord.router.plan import empty_route_plan

SPARE_BLOCKS = 3
"""Capacity beyond the worst case, to see that it stays untouched."""


class Settings(NamedTuple):
    """The arguments of a router call besides its tensors."""

    block_m: int = 8
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    local_experts: range | torch.Tensor | None = None
    num_local_experts: int | None = None


class Buffers(NamedTuple):
    """Poisoned outputs of one router call."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    plan: RoutePlan


def spacious_plan(
    num_tokens: int, top_k: int, num_local: int, block_m: int, device: torch.device, spare: int = SPARE_BLOCKS
) -> RoutePlan:
    """A poisoned plan with `spare` blocks more than can be needed."""
    blocks = max_route_blocks(num_tokens, top_k, num_local, block_m) + spare
    plan = empty_route_plan(0, top_k, num_local, block_m, device)
    return poisoned_plan(
        plan._replace(
            sorted_token_ids=torch.empty(blocks * block_m, dtype=torch.int32, device=device),
            expert_ids=torch.empty(blocks, dtype=torch.int32, device=device),
        )
    )


def poisoned_buffers(case: RouterCase, settings: Settings, spare: int = SPARE_BLOCKS) -> Buffers:
    """Outputs for one call, all poisoned (NaN weights)."""
    tokens, device = case.logits.shape[0], case.logits.device
    _, num_local = resolve_local_experts(
        settings.local_experts, case.logits.shape[1], device, settings.num_local_experts
    )
    return Buffers(
        torch.full((tokens, case.top_k), float("nan"), device=device),
        torch.full((tokens, case.top_k), POISON, dtype=torch.int32, device=device),
        spacious_plan(tokens, case.top_k, num_local, settings.block_m, device, spare),
    )


def router_problems(case: RouterCase, settings: Settings, written: Buffers, right: Buffers | None = None) -> list[str]:
    """Everything that is wrong with the outputs of a call on poisoned buffers.

    right: outputs of the same rows with the same renormalize and routed_scaling_factor whose ids and weights were right
    already. Where the bits agree those need not be held against the reference again; the plan is all the same.
    """
    problems: list[str] = []
    if right is None or differing(("weights", "ids"), written[:2], right[:2]):
        problems = check_ids(written.topk_ids, case.logits, case.bias)
        if problems:  # weights and plan are judged given valid ids
            return problems
        weighting = settings.renormalize, settings.routed_scaling_factor
        problems = check_weights(written.topk_weights, written.topk_ids, case.logits, case.bias, *weighting)
    expert_map, _ = resolve_local_experts(
        settings.local_experts, case.logits.shape[1], case.logits.device, settings.num_local_experts
    )
    return problems + check_plan(written.plan, written.topk_ids, case.logits.shape[1], settings.block_m, expert_map)


def prepared_on(
    case: RouterCase, settings: Settings, buffers: Buffers, program: str | None = None
) -> PreparedFusedRouter:
    """The routed program, or the named one, bound to a case and to outputs."""
    return prepare_fused_router(
        case.logits, case.bias, top_k=case.top_k, **settings._asdict(), **buffers._asdict(), program=program
    )


def run_prepared(case: RouterCase, settings: Settings, program: str | None = None, launches: int = 1) -> Buffers:
    """Outputs of a prepared launch on poisoned buffers, launched so many times."""
    buffers = poisoned_buffers(case, settings)
    prepared = prepared_on(case, settings, buffers, program)
    for _ in range(launches):
        prepared()
    return buffers


def run_graphed(case: RouterCase, settings: Settings, program: str | None = None) -> Buffers:
    """Outputs of a CUDA graph's replay on buffers that were poisoned after the capture."""
    buffers = poisoned_buffers(case, settings)
    replay = graphed(prepared_on(case, settings, buffers, program))
    buffers.topk_weights.fill_(float("nan"))
    buffers.topk_ids.fill_(POISON)
    poison(buffers.plan)
    replay()
    return buffers


def run_from_host(
    case: RouterCase, settings: Settings, device: torch.device, program: str | None = None, launches: int = 1
) -> Buffers:
    """`run_prepared` for a case in the host's memory, where the outputs lie as well; no kernels but the program's.

    Under a sanitizer each further kernel costs seconds, and what a kernel that is not watched has written counts as
    never written.
    """
    buffers = poisoned_buffers(case, settings)
    local, count = resolve_local_experts(settings.local_experts, case.logits.shape[1], case.logits.device)
    if local is not None:
        settings = settings._replace(local_experts=local.to(device), num_local_experts=count)
    case = case._replace(logits=case.logits.to(device), bias=case.bias.to(device))
    written = _moved(buffers, device)
    prepared = prepared_on(case, settings, written, program)
    for _ in range(launches):
        prepared()
    return _moved(written, torch.device("cpu"))


def _moved(buffers: Buffers, device: torch.device) -> Buffers:
    plan = RoutePlan(*(tensor.to(device) for tensor in buffers.plan))
    return Buffers(buffers.topk_weights.to(device), buffers.topk_ids.to(device), plan)


def run_eager(case: RouterCase, settings: Settings) -> Buffers:
    """Outputs of `chord.fused_router` into a poisoned plan."""
    buffers = poisoned_buffers(case, settings)
    output = fused_router(case.logits, case.bias, top_k=case.top_k, **settings._asdict(), plan=buffers.plan)
    return Buffers(output.topk_weights, output.topk_ids, output.plan)


def check_router(
    case: RouterCase, settings: Settings, program: str | None = None, right: Buffers | None = None
) -> list[str]:
    """Runs a case through the routed program, or the named one; each problem is prefixed with what was run. right: as
    for router_problems.
    """
    return _labelled(
        case, settings, program, router_problems(case, settings, run_prepared(case, settings, program), right)
    )


def check_router_with(case: RouterCase, several: Iterable[Settings]) -> list[str]:
    """The same with several settings. Ids and weights depend on neither block_m nor local experts, so that those with
    the bits of some that were right are right.
    """
    problems = []
    right: dict[tuple[bool, float], Buffers] = {}
    for settings in several:
        written, weighting = run_prepared(case, settings), (settings.renormalize, settings.routed_scaling_factor)
        found = router_problems(case, settings, written, right.get(weighting))
        if not found:
            right.setdefault(weighting, written)
        problems += _labelled(case, settings, None, found)
    return problems


def _labelled(case: RouterCase, settings: Settings, program: str | None, problems: list[str]) -> list[str]:
    label = f"{case.name} {tuple(case.logits.shape)} {case.logits.dtype} {_described(settings)} {program or 'routed'}"
    return [f"{label}: {problem}" for problem in problems]


def check_route_plan(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    local_experts: range | torch.Tensor | None = None,
    num_local_experts: int | None = None,
) -> list[str]:
    """Runs `chord.route_plan` on given ids into a poisoned plan and lists what is wrong with it."""
    expert_map, num_local = resolve_local_experts(local_experts, num_experts, topk_ids.device, num_local_experts)
    plan = spacious_plan(topk_ids.shape[0], topk_ids.shape[1], num_local, block_m, topk_ids.device)
    route_plan(
        topk_ids, num_experts, block_m, local_experts=local_experts, num_local_experts=num_local_experts, plan=plan
    )
    label = f"route_plan {tuple(topk_ids.shape)} experts {num_experts} local {num_local} block_m {block_m}"
    return [f"{label}: {problem}" for problem in check_plan(plan, topk_ids, num_experts, block_m, expert_map)]


def run_route_plan_from_host(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, device: torch.device, program: str
) -> list[str]:
    """What is wrong with a plan that the named program makes of ids in the host's memory; no kernels but its own."""
    plan = spacious_plan(topk_ids.shape[0], topk_ids.shape[1], num_experts, block_m, topk_ids.device)
    ids, placed = topk_ids.to(device), RoutePlan(*(tensor.to(device) for tensor in plan))
    problem: launch.Problem = {"num_pairs": ids.numel(), "block_m": block_m}
    loaded = launch.load("route_plan", device.index, problem, program)
    workspace = workspaces.new(device.index, loaded.workspace_bytes, loaded.workspace_zeroed)
    values = launch.plan_values(ids, num_experts, block_m, None, placed) | {"workspace": workspace.data_ptr()}
    named = dict(zip(loaded.arguments, loaded.pick(values), strict=True))
    loaded.kernel.prepare(named, stream=_runtime.stream_provider(device.index))()
    written = RoutePlan(*(tensor.cpu() for tensor in placed))
    label = f"{program} {tuple(ids.shape)} experts {num_experts} block_m {block_m}"
    return [f"{label}: {problem}" for problem in check_plan(written, topk_ids, num_experts, block_m)]


def candidates(case: RouterCase, settings: Settings) -> list[str]:
    """Names of all programs with a build for the case's GPU that admit it, routed or not, sorted."""
    problem = launch.router_problem(case.logits, case.top_k, settings.block_m)
    programs = _runtime.registry().programs("fused_router", _runtime.architecture(case.logits.device.index))
    return [name for name, program in programs.items() if launch.admits(program, problem)]


def routed_program(case: RouterCase, settings: Settings) -> str:
    """Name of the program that the registry routes the case to."""
    problem = launch.router_problem(case.logits, case.top_k, settings.block_m)
    arch = _runtime.architecture(case.logits.device.index)
    return _runtime.registry().lookup("fused_router", arch, problem).program_name


def compare_programs(case: RouterCase, settings: Settings, programs: Sequence[str] | None = None) -> list[str]:
    """Runs a case through every program that admits it, or the named ones: each result right, and all of them
    bitwise the same. Once one was compared with the reference and right, equal bits prove the others right.
    """
    problems: list[str] = []
    right: Buffers | None = None
    for name in candidates(case, settings) if programs is None else programs:
        written = run_prepared(case, settings, name)
        found = verdict(case, settings, written, right)
        problems += [f"{case.name} {name}: {problem}" for problem in found]
        if right is None and not found:
            right = written
    return problems


def verdict(case: RouterCase, settings: Settings, written: Buffers, right: Buffers | None) -> list[str]:
    """What is wrong with outputs: by their bits where outputs that are `right` are known, else by the reference."""
    if right is None:
        return router_problems(case, settings, written)
    return [
        f"the bits of {field} differ from those of a program that was right" for field in differences(written, right)
    ]


def differences(mine: Buffers, theirs: Buffers) -> list[str]:
    """Names of the outputs that have not the same bits."""
    names = ("topk_weights", "topk_ids", *RoutePlan._fields)
    return differing(
        names, (mine.topk_weights, mine.topk_ids, *mine.plan), (theirs.topk_weights, theirs.topk_ids, *theirs.plan)
    )


def _described(settings: Settings) -> str:
    """The settings that are not the defaults, and block_m."""
    if isinstance(settings.local_experts, torch.Tensor):
        settings = settings._replace(local_experts=None, num_local_experts=-1)  # a map is named, not printed
    changed = (f"{key}={value}" for key, value in settings._asdict().items() if value != Settings._field_defaults[key])
    return " ".join([f"block_m={settings.block_m}", *(text for text in changed if not text.startswith("block_m"))])
