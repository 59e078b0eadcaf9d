"""From checked CUDA tensors to kernels of the registry. Never falls back: what the manifest routes is what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from chord import _runtime
from chord._runtime import Prepared
from chord.errors import ManifestError, NoProgramError
from chord.registry import Kernel, PreparedLaunch
from chord.registry.schema import Operator, Program
from chord.router.validate import check_int
from chord.w4a16.layout import LAYOUT_VERSION, WeightShape

OPERATOR = "moe_w4a16"
CONTIGUOUS = "moe_w4a16_contiguous"
MASKED = "moe_w4a16_masked"
GEMMS = {OPERATOR: 2, CONTIGUOUS: 1, MASKED: 1}
"""The operators, with the version of the argument list that is passed to each."""
SUMS = "moe_w4a16_combine"
MOVERS = {"moe_swiglu": 2, "moe_scatter": 2, "moe_combine": 2, SUMS: 2}
"""The operators that move and sum rows, likewise."""
MAX_EXPERT_ROWS = 1 << 30
_BELONG = "install the chord and the registry that belong together"

_LEAST_TILE_ROWS = 16  # the shortest of the programs' tallest tiles: bounds how many tiles a block can give
_MAX_ITEMS = _MAX_ROWS = (1 << 31) - 1  # of rows: that the axis all_rows knows


class Interval(NamedTuple):
    """Which program serves a range of expected rows an expert."""

    first: int
    last: int
    program: str


def gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    plan: Sequence[torch.Tensor],
    row_weight: torch.Tensor | None,
    out: torch.Tensor,
    shape: WeightShape,
    *,
    top_k: int,
    block_m: int,
    expert_rows: int,
    invariant: bool,
    swiglu: bool = False,
    program: str | None = None,
) -> None:
    """Launches the routed program (or `program`, for measurements) on torch's current stream of the tensors' device."""
    values = gemm_values(x, packed, plan, row_weight, out, shape, top_k=top_k, block_m=block_m, swiglu=swiglu)
    launch(OPERATOR, values, x.device.index, shape, expert_rows, invariant, program)


def launch(
    operator: str,
    values: dict[str, int],
    device: int,
    shape: WeightShape,
    expert_rows: int,
    invariant: bool,
    program: str | None = None,
) -> None:
    """Launches an operator's routed program, or the named one, with these values on torch's current stream."""
    _launch(_chosen(operator, device, shape, values, expert_rows, invariant, program), device, values)


def prepare_gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    plan: Sequence[torch.Tensor],
    row_weight: torch.Tensor | None,
    out: torch.Tensor,
    shape: WeightShape,
    *,
    top_k: int,
    block_m: int,
    expert_rows: int,
    invariant: bool,
    swiglu: bool = False,
    program: str | None = None,
) -> Prepared:
    """Binds what `gemm` would launch to checked buffers; it follows torch's current stream."""
    values = gemm_values(x, packed, plan, row_weight, out, shape, top_k=top_k, block_m=block_m, swiglu=swiglu)
    owners = (x, packed, *plan, row_weight, out)
    return prepare(OPERATOR, values, x.device.index, shape, expert_rows, invariant, program, owners)


def prepare(
    operator: str,
    values: dict[str, int],
    device: int,
    shape: WeightShape,
    expert_rows: int,
    invariant: bool,
    program: str | None,
    owners: object,
    sums: dict[str, int] | None = None,
) -> Prepared:
    """Binds what `launch` would launch, or with `sums` what `launch_with_sums` would, as one launch that asks for the
    stream once. Named after the GEMM; the result keeps `owners`, the buffers, alive.
    """
    stream = _runtime.stream_provider(device)
    kernel = _chosen(operator, device, shape, values, expert_rows, invariant, program)
    behind = None if sums is None else _row_mover(SUMS, device, sums["num_units"]).prepare(sums, stream=stream)
    bound = kernel.prepare(values, stream=stream, owners=owners)
    bound = bound if behind is None else bound.followed_by(behind)
    bound.make_ready(_runtime.raw_stream(device))
    return Prepared(bound, kernel.name)


def launch_with_sums(
    values: dict[str, int],
    sums: dict[str, int],
    device: int,
    shape: WeightShape,
    expert_rows: int,
    invariant: bool,
) -> None:
    """Launches a routed GEMM and the sums behind it, or neither: what cannot be loaded is found before the first."""
    behind = _row_mover(SUMS, device, sums["num_units"])
    launch(OPERATOR, values, device, shape, expert_rows, invariant)
    _launch(behind, device, sums)


def gemm_values(
    x: torch.Tensor,
    packed: torch.Tensor,
    plan: Sequence[torch.Tensor],
    row_weight: torch.Tensor | None,
    out: torch.Tensor,
    shape: WeightShape,
    *,
    top_k: int,
    block_m: int,
    swiglu: bool = False,
) -> dict[str, int]:
    """Every argument of the moe_w4a16 contract by name; pointers as ints. plan: ids, expert ids, padded length."""
    sorted_token_ids, expert_ids, num_tokens_post_padded = plan
    blocks = expert_ids.numel()
    tiles = blocks * -(-block_m // _LEAST_TILE_ROWS)
    return {
        "x": x.data_ptr(),
        "packed": packed.data_ptr(),
        "sorted_token_ids": sorted_token_ids.data_ptr(),
        "expert_ids": expert_ids.data_ptr(),
        "num_tokens_post_padded": num_tokens_post_padded.data_ptr(),
        "row_weight": 0 if row_weight is None else row_weight.data_ptr(),
        "out": out.data_ptr(),
        "num_rows": x.shape[0],
        "top_k": top_k,
        "n": shape.n,
        "k": shape.k,
        "num_experts": shape.experts,
        "block_m": block_m,
        "num_slots": sorted_token_ids.numel(),
        "num_blocks": blocks,
        "gated": store_of(shape, swiglu),
        "num_items": most_items(tiles, shape),
    }


def store_of(shape: WeightShape, swiglu: bool) -> int:
    """What the kernels' `gated` says of the store: 0 outputs in order, 1 as [gate | up], 2 silu(gate) * up."""
    return int(shape.gated) + int(swiglu)


def most_tiles(rows: int, experts: int) -> int:
    """At least the row tiles of so many rows, however they are spread over experts."""
    return rows // _LEAST_TILE_ROWS + experts


def most_items(tiles: int, shape: WeightShape) -> int:
    """Items of so many row tiles, cut by strips of 64 outputs as a last round's are: bounds a grid."""
    return min(tiles * -(-shape.n // 64), _MAX_ITEMS)


def most_rows(values: Mapping[str, int], shape: WeightShape) -> int:
    """Rows that an expert can have on average at most, by a kernel's arguments: of its slab, or its share of all."""
    slab = values.get("rows_each")
    return -(-values["num_rows"] * values.get("top_k", 1) // shape.experts) if slab is None else slab


def all_rows(values: Mapping[str, int]) -> int:
    """Rows that all experts can have together, by moe_w4a16's arguments; no more are told apart than routes do."""
    return min(values["num_rows"] * values["top_k"], _last_few() + 1)


@lru_cache(maxsize=1)
def _last_few() -> int:
    """The most rows that a route of moe_w4a16 for few of them names."""
    routes = (route for found in _definition(OPERATOR).routes.values() for route in found)
    sides = (side for route in routes if isinstance(side := route.where["all_rows"], tuple))
    return max((last for _, last in sides if last < _MAX_ROWS), default=0)


def few_arms(arch: str) -> frozenset[str]:
    """Arms of moe_w4a16 that routes for few rows alone name."""
    operator = _definition(OPERATOR)
    few: dict[bool, set[str]] = {True: set(), False: set()}
    for route in operator.routes.get(arch, ()):
        side = route.where["all_rows"]
        few[isinstance(side, tuple) and side[1] < _MAX_ROWS].add(operator.programs[route.program].arm)
    return frozenset(few[True] - few[False])


def routed_program(
    shape: WeightShape,
    expert_rows: int,
    arch: str,
    operator: str = OPERATOR,
    *,
    most_rows: int | None = None,
    all_rows: int | None = None,
) -> str:
    """Name of the program that serves a weight shape; expert_rows are expected, most_rows (default: those) possible."""
    rows = min(expert_rows, MAX_EXPERT_ROWS)
    more = {"most_rows": most_rows, "all_rows": all_rows}
    intervals = route_intervals(shape.n, shape.k, shape.experts, arch, operator, **more)
    return next(interval.program for interval in intervals if interval.first <= rows <= interval.last)


def pack(
    codes: torch.Tensor,
    scale: torch.Tensor,
    packed: torch.Tensor,
    wrong: torch.Tensor,
    shape: WeightShape,
    *,
    plain: bool,
) -> None:
    """Checkpoint to packed bytes."""
    values = {"codes": codes.data_ptr(), "scales": scale.data_ptr(), "packed": packed.data_ptr()}
    values |= {"wrong": wrong.data_ptr(), "plain": int(plain)}
    _move("w4a16_pack", packed.device.index, values, shape)


def unpack(packed: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, shape: WeightShape) -> None:
    """Packed bytes to a checkpoint."""
    values = {"packed": packed.data_ptr(), "codes": codes.data_ptr(), "scales": scale.data_ptr()}
    _move("w4a16_unpack", packed.device.index, values, shape)


def move_rows(operator: str, device: int, values: dict[str, int]) -> None:
    """Launches an operator of MOVERS with arguments of its contract, which are checked."""
    _launch(_row_mover(operator, device, values["num_units"]), device, values)


def route_intervals(
    n: int,
    k: int,
    experts: int,
    arch: str,
    operator: str = OPERATOR,
    *,
    most_rows: int | None = None,
    all_rows: int | None = None,
) -> list[Interval]:
    """What would be selected on an architecture ("sm_90a") for which expected rows an expert: ascending, without gap.

    operator: moe_w4a16, moe_w4a16_contiguous or moe_w4a16_masked. most_rows: rows that an expert can have on average at
    most, which is M * top_k / E, M / E or T, rounded up. Default: no more than are expected, as where a call says
    nothing else. all_rows: rows that all experts can have together, M * top_k; of moe_w4a16 alone, whose programs for
    few rows are chosen by it. Default: more than those serve.
    """
    if not isinstance(operator, str) or operator not in GEMMS:
        raise ValueError(f"operator: expected one of {', '.join(GEMMS)}, got {operator!r}")
    if not isinstance(arch, str):
        raise TypeError(f"arch: expected a name such as 'sm_90a', got {arch!r} ({type(arch).__name__})")
    WeightShape(experts, n, k)
    fixed = {"n": n, "k": k, "experts": experts}
    if most_rows is not None:
        check_int("most_rows", most_rows, 0)
        fixed["most_rows"] = min(most_rows, MAX_EXPERT_ROWS)
    if all_rows is not None:
        check_int("all_rows", all_rows, 0)
        if operator != OPERATOR:
            raise ValueError(f"all_rows: expected with {OPERATOR} alone, {operator} has no routes by it; leave it out")
    if operator == OPERATOR:
        fixed["all_rows"] = _MAX_ROWS if all_rows is None else min(all_rows, _MAX_ROWS)
    definition, found = _definition(operator), []
    for route in definition.routes.get(arch, ()):
        sides = {key: side for key, side in route.where.items() if isinstance(side, tuple)}
        first, last = sides["expert_rows"]
        if most_rows is None:
            first, last = max(first, sides["most_rows"][0]), min(last, sides["most_rows"][1])
        if first <= last and all(sides[key][0] <= value <= sides[key][1] for key, value in fixed.items()):
            found.append(Interval(first, last, route.program))
    if not found:
        known = ", ".join(definition.routes) or "none"
        raise NoProgramError(f"{operator}: no routes for {arch}; this registry has them for {known}")
    return sorted(found)


def _definition(operator: str) -> Operator:
    """One of GEMMS in the manifest. Raises ManifestError unless its routes go by what is known here."""
    found = _runtime.operator(operator)
    keys = {key for axis in found.axes for key in axis.keys}
    wanted = {"expert_rows", "most_rows", "n", "k", "experts"} | ({"all_rows"} if operator == OPERATOR else set())
    if keys != wanted:
        raise ManifestError(
            f"{operator}: this chord chooses among programs by {', '.join(sorted(wanted))}, the manifest by "
            f"{', '.join(sorted(keys))}; {_BELONG}"
        )
    return found


def _chosen(
    operator: str,
    device: int,
    shape: WeightShape,
    values: Mapping[str, int],
    expert_rows: int,
    invariant: bool,
    program: str | None,
) -> Kernel:
    if program is not None:
        return _named_kernel(operator, device, program, shape)
    rows, most = min(expert_rows, MAX_EXPERT_ROWS), most_rows(values, shape)
    together = all_rows(values) if operator == OPERATOR else None
    return _gemm_kernel(operator, device, shape.n, shape.k, shape.experts, rows, most, together, invariant)


@lru_cache(maxsize=4096)
def _gemm_kernel(
    operator: str,
    device: int,
    n: int,
    k: int,
    experts: int,
    expert_rows: int,
    most: int,
    together: int | None,
    invariant: bool,
) -> Kernel:
    arch = _runtime.architecture(device)
    intervals = route_intervals(n, k, experts, arch, operator)
    if invariant and len(_families(operator, intervals)) > 1:
        return _load(operator, device, intervals[-1].program)  # the one for the most rows, whatever is expected
    shape = WeightShape(experts, n, k)
    return _load(
        operator, device, routed_program(shape, expert_rows, arch, operator, most_rows=most, all_rows=together)
    )


def serves(program: Program, shape: WeightShape) -> bool:
    """Whether a program's own limit admits a weight shape."""
    limit = program.limit("k")
    return limit is None or shape.k <= limit


@lru_cache(maxsize=256)
def _named_kernel(operator: str, device: int, program: str, shape: WeightShape) -> Kernel:
    found = _runtime.operator(operator).programs.get(program)
    if found is None:
        raise NoProgramError(f"{program}: no such program of {operator}; see `chord ls`")
    if not serves(found, shape):
        raise NoProgramError(f"{program}: serves k of at most {found.limit('k')}, got {shape.k}")
    return _load(operator, device, program)


def _families(operator: str, intervals: list[Interval]) -> set[object]:
    """Main loops of the programs: those of one main loop give the same bits."""
    programs = _runtime.operator(operator).programs
    return {programs[interval.program].constants["loop"] for interval in intervals}


@lru_cache(maxsize=64)
def _mover(operator: str, device: int, blocks: int) -> Kernel:
    arch = _runtime.architecture(device)
    return _load(operator, device, _runtime.registry().lookup(operator, arch, {"num_blocks": blocks}).program_name)


@lru_cache(maxsize=1024)
def _row_mover(operator: str, device: int, units: int) -> Kernel:
    arch = _runtime.architecture(device)
    return _load(operator, device, _runtime.registry().lookup(operator, arch, {"num_units": units}).program_name)


def _move(operator: str, device: int, values: dict[str, int], shape: WeightShape) -> None:
    values |= {"n": shape.n, "k": shape.k, "gated": int(shape.gated), "num_blocks": shape.blocks}
    _launch(_mover(operator, device, shape.blocks), device, values)


def _load(operator: str, device: int, program: str) -> Kernel:
    version = _runtime.operator(operator).abi_version
    wanted = (GEMMS | MOVERS).get(operator, LAYOUT_VERSION)
    if version != wanted:
        raise ManifestError(f"{operator}: this chord expects version {wanted}, the manifest has {version}; {_BELONG}")
    return _runtime.registry().load(program, device=device)


@lru_cache(maxsize=1024)
def _bound(kernel: Kernel, values: tuple[tuple[str, int], ...], stream: int) -> PreparedLaunch:
    """A launch of exactly these values. Steady eager loops get the same addresses from torch's allocator every time."""
    return kernel.prepare(dict(values), stream=stream)


def _launch(kernel: Kernel, device: int, values: dict[str, int]) -> None:
    _bound(kernel, tuple(values.items()), _runtime.raw_stream(device))()
