"""From checked CUDA tensors to kernels of the registry. Never falls back: what the manifest routes is what runs.

Loaded kernels are remembered per (device, problem), so that a repeated eager call costs a dictionary look-up and a
launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch

from chord import _runtime
from chord.errors import ManifestError, NoProgramError
from chord.registry import Kernel, PreparedLaunch
from chord.registry.schema import Operator, Program
from chord.router import workspaces
from chord.router.plan import RoutePlan
from chord.router.validate import LOGITS_DTYPES

ABI_VERSION = 1
"""Version of both operators' argument lists that this module passes."""

_INPUTS = {"fused_router": ("logits", "bias", "topk_weights", "topk_ids"), "route_plan": ("topk_ids",)}
_SCALARS = {
    "fused_router": ("num_tokens", "num_local_experts", "block_m", "renormalize", "routed_scaling_factor"),
    "route_plan": ("num_pairs", "num_experts", "num_local_experts", "block_m"),
}
_KNOWN_LIMIT = 4096  # problems remembered before the cache starts again: every count up to 1024 at 4 settings

Problem = dict[str, int | str]


class Loaded(NamedTuple):
    """A program on a device, ready to be given arguments."""

    name: str
    kernel: Kernel
    arguments: tuple[str, ...]
    pick: Callable[[Mapping[str, int | float]], tuple[int | float, ...]]
    """From values by name to the values of `arguments`, in that order."""
    workspace_bytes: int
    workspace_zeroed: bool
    lock: threading.Lock | None
    """Held from the first to the last launch of several that share a stream's self-resetting workspace; one a
    program.
    """


_loaded: dict[tuple[object, ...], Loaded] = {}
_launch_locks: dict[str, threading.Lock] = {}


def fused_router(
    logits: torch.Tensor,
    bias: torch.Tensor,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: RoutePlan,
) -> None:
    """Launches the routed program on torch's current stream of the tensors' device."""
    num_tokens, num_experts = logits.shape
    top_k, device = topk_ids.shape[1], logits.device.index
    key = (device, num_experts, top_k, logits.dtype, num_tokens, block_m)
    loaded = _loaded.get(key) or _remember(key, "fused_router", device, router_problem(logits, top_k, block_m))
    values = router_values(
        logits, bias, block_m, renormalize, routed_scaling_factor, expert_map, topk_weights, topk_ids, plan
    )
    _launch(loaded, values, device)


def route_plan(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None,
    plan: RoutePlan,
    workspace: torch.Tensor | None = None,
) -> None:
    """Launches the plan's program on torch's current stream of the tensors' device.

    workspace: at least `plan_workspace_bytes` of uint8, nobody else's meanwhile; else torch's allocator gives it.
    """
    pairs, device = topk_ids.numel(), topk_ids.device.index
    key = (device, pairs, block_m)
    loaded = _loaded.get(key) or _remember(key, "route_plan", device, {"num_pairs": pairs, "block_m": block_m})
    _launch(loaded, plan_values(topk_ids, num_experts, block_m, expert_map, plan), device, workspace)


def plan_workspace_bytes(pairs: int) -> int:
    """Scratch memory that suffices for any program of route_plan. Needs no GPU."""
    fixed, each = _plan_workspace()
    return fixed + each * pairs


@lru_cache(maxsize=1)
def _plan_workspace() -> tuple[int, int]:
    """(bytes, bytes for each pair), both the most of any program."""
    needs = [program.workspace for program in _runtime.operator("route_plan").programs.values()]
    return max(need.bytes for need in needs), max(need.bytes_per_token for need in needs)


def prepare_fused_router(
    logits: torch.Tensor,
    bias: torch.Tensor,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: RoutePlan,
    program: str | None = None,
) -> _runtime.Prepared:
    """Binds a program (the routed one unless `program` names another) to checked buffers and a workspace of its own."""
    device = logits.device.index
    problem = router_problem(logits, topk_ids.shape[1], block_m)
    loaded = load("fused_router", device, problem, program)
    values = router_values(
        logits, bias, block_m, renormalize, routed_scaling_factor, expert_map, topk_weights, topk_ids, plan
    )
    workspace = workspaces.new(device, loaded.workspace_bytes, loaded.workspace_zeroed)
    values["workspace"] = workspace.data_ptr()
    named = dict(zip(loaded.arguments, loaded.pick(values), strict=True))
    owners = (logits, bias, expert_map, topk_weights, topk_ids, plan, workspace)
    bound = loaded.kernel.prepare(named, stream=_runtime.stream_provider(device), owners=owners)
    bound.make_ready(_runtime.raw_stream(device))
    return _runtime.Prepared(bound, loaded.name)


def router_problem(logits: torch.Tensor, top_k: int, block_m: int) -> Problem:
    """The manifest's key of a fused_router call."""
    return {
        "num_experts": logits.shape[1],
        "top_k": top_k,
        "logits": LOGITS_DTYPES[logits.dtype],
        "num_tokens": logits.shape[0],
        "block_m": block_m,
    }


def router_values(
    logits: torch.Tensor,
    bias: torch.Tensor,
    block_m: int,
    renormalize: bool,
    routed_scaling_factor: float,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    plan: RoutePlan,
) -> dict[str, int | float]:
    """Every argument of the fused_router contract but the workspace, by name; pointers as ints."""
    return {
        "logits": logits.data_ptr(),
        "bias": bias.data_ptr(),
        "topk_weights": topk_weights.data_ptr(),
        "topk_ids": topk_ids.data_ptr(),
        **_plan_values(plan, expert_map),
        "num_tokens": logits.shape[0],
        "block_m": block_m,
        "renormalize": int(renormalize),
        "routed_scaling_factor": float(routed_scaling_factor),
    }


def plan_values(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map: torch.Tensor | None, plan: RoutePlan
) -> dict[str, int | float]:
    """Every argument of the route_plan contract but the workspace, by name."""
    return {
        "topk_ids": topk_ids.data_ptr(),
        **_plan_values(plan, expert_map),
        "num_pairs": topk_ids.numel(),
        "num_experts": num_experts,
        "block_m": block_m,
    }


def _plan_values(plan: RoutePlan, expert_map: torch.Tensor | None) -> dict[str, int | float]:
    return {
        "sorted_token_ids": plan.sorted_token_ids.data_ptr(),
        "expert_ids": plan.expert_ids.data_ptr(),
        "num_tokens_post_padded": plan.num_tokens_post_padded.data_ptr(),
        "expert_counts": plan.expert_counts.data_ptr(),
        "expert_offsets": plan.expert_offsets.data_ptr(),
        "expert_scatter_offsets": plan.expert_scatter_offsets.data_ptr(),
        "expert_map": 0 if expert_map is None else expert_map.data_ptr(),
        "num_local_experts": plan.expert_counts.shape[0],
    }


def load(operator: str, device: int, problem: Problem, program: str | None = None) -> Loaded:
    """Looks up (or takes `program`), checks the argument list, verifies and loads. Raises chord errors."""
    opened, definition = _runtime.registry(), _runtime.operator(operator)
    name = program or opened.lookup(operator, _runtime.architecture(device), problem).program_name
    if name not in definition.programs:
        raise NoProgramError(f"{name}: no such program of {operator}; see `chord ls`")
    chosen = definition.programs[name]
    check_admits(name, chosen, problem)
    arguments = check_abi(operator, definition, name, chosen)
    tokens = problem["num_tokens" if operator == "fused_router" else "num_pairs"]
    assert isinstance(tokens, int)  # noqa: S101 - tells mypy which half of the union it is
    kernel = opened.load(name, device=device)
    several = chosen.workspace.zeroed and len(chosen.kernels) > 1
    return Loaded(
        name,
        kernel,
        arguments,
        itemgetter(*arguments),
        kernel.workspace_bytes(tokens),
        chosen.workspace.zeroed,
        _launch_locks.setdefault(name, threading.Lock()) if several else None,
    )


def admits(program: Program, problem: Mapping[str, int | str]) -> bool:
    """Whether a program can serve a problem: its constants agree with the problem's values, its limits hold them."""
    return all(
        program.constants.get(key, value) == value and _within(program.limit(key), value)
        for key, value in problem.items()
    )


def _within(limit: int | None, value: int | str) -> bool:
    return limit is None or int(value) <= limit


def check_admits(name: str, program: Program, problem: Mapping[str, int | str]) -> None:
    """Raises NoProgramError for a program that was compiled for another problem."""
    if not admits(program, problem):
        fixed = {key: program.constants[key] for key in problem if key in program.constants}
        limits = {f"most {key}": limit for key in problem if (limit := program.limit(key)) is not None}
        raise NoProgramError(f"{name}: compiled for {fixed | limits}, asked for {dict(problem)}")


def check_abi(operator: str, definition: Operator, name: str, program: Program) -> tuple[str, ...]:
    """The program's argument names. Raises ManifestError when they are not what this module passes.

    A program may leave out the workspace and scalars that are compiled into it, and nothing else.
    """
    if definition.abi_version != ABI_VERSION:
        raise ManifestError(
            f"{operator}: this chord passes ABI version {ABI_VERSION}, the manifest has {definition.abi_version};"
            " install the chord and the registry that belong together"
        )
    plan = (*RoutePlan._fields, "expert_map")
    known = {*_INPUTS[operator], *plan, *_SCALARS[operator], "workspace"}
    optional = {"workspace", *(key for key in _SCALARS[operator] if key in program.constants)}
    arguments = tuple(arg.name for arg in definition.arms[program.arm].args)
    missing, unknown = known - optional - set(arguments), set(arguments) - known
    if missing or unknown:
        raise ManifestError(
            f"{name}: chord passes {sorted(known)}, the manifest's arm takes {sorted(arguments)};"
            f" missing {sorted(missing)}, unknown {sorted(unknown)}"
        )
    return arguments


def _remember(key: tuple[object, ...], operator: str, device: int, problem: Problem) -> Loaded:
    if len(_loaded) >= _KNOWN_LIMIT:
        _loaded.clear()
    return _loaded.setdefault(key, load(operator, device, problem))


@lru_cache(maxsize=1024)
def _bound(kernel: Kernel, values: tuple[int | float, ...], stream: int) -> PreparedLaunch:
    """A launch of exactly these values. Steady eager loops get the same addresses from torch's allocator every time."""
    named = {arg.name: value for arg, value in zip(kernel.args, values, strict=True)}
    return kernel.prepare(named, stream=stream)


def _launch(loaded: Loaded, values: dict[str, int | float], device: int, workspace: torch.Tensor | None = None) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device)
    if loaded.workspace_bytes and (workspace is None or loaded.workspace_zeroed):
        workspace = (
            workspaces.shared(device, stream, loaded.name, loaded.workspace_bytes)
            if loaded.workspace_zeroed
            else workspaces.new(device, loaded.workspace_bytes, zeroed=False)
        )  # a local name keeps it alive until the launch is under way
    if workspace is not None:
        values["workspace"] = workspace.data_ptr()
    bound = _bound(loaded.kernel, loaded.pick(values), stream)
    if loaded.lock is None:
        bound()
    else:
        with loaded.lock:
            bound()
