"""From checked CUDA tensors to kernels of the registry. Never falls back: what the manifest routes is what runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from chord import _runtime
from chord._runtime import Prepared
from chord.errors import ManifestError, NoProgramError
from chord.registry import Kernel, PreparedLaunch
from chord.registry.schema import Program
from chord.w4a16.layout import LAYOUT_VERSION, WeightShape

OPERATOR = "moe_w4a16"
ABI_VERSION = 1
"""Version of moe_w4a16's argument list that this module passes."""
MAX_EXPERT_ROWS = 1 << 30

_LEAST_TILE_ROWS = 32  # the shortest of the programs' tallest tiles: bounds how many tiles a block can give
_MAX_ITEMS = (1 << 31) - 1


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
    program: str | None = None,
) -> None:
    """Launches the routed program (or `program`, for measurements) on torch's current stream of the tensors' device."""
    device = x.device.index
    kernel = _chosen(device, shape, expert_rows, invariant, program)
    _launch(kernel, device, gemm_values(x, packed, plan, row_weight, out, shape, top_k=top_k, block_m=block_m))


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
    program: str | None = None,
) -> Prepared:
    """Binds what `gemm` would launch to checked buffers; it follows torch's current stream."""
    device = x.device.index
    kernel = _chosen(device, shape, expert_rows, invariant, program)
    values = gemm_values(x, packed, plan, row_weight, out, shape, top_k=top_k, block_m=block_m)
    bound = kernel.prepare(values, stream=_runtime.stream_provider(device))
    return Prepared(bound, kernel.name, (x, packed, *plan, row_weight, out))


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
        "gated": int(shape.gated),
        "num_items": min(tiles * -(-shape.n // 256), _MAX_ITEMS),
    }


def routed_program(shape: WeightShape, expert_rows: int, arch: str) -> str:
    """Name of the program that serves a weight shape with so many rows an expert."""
    rows = min(expert_rows, MAX_EXPERT_ROWS)
    return next(i.program for i in route_intervals(shape.n, shape.k, shape.experts, arch) if i.first <= rows <= i.last)


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


def route_intervals(n: int, k: int, experts: int, arch: str) -> list[Interval]:
    """What would be selected on an architecture ("sm_90a") for which rows an expert: ascending, without gap."""
    WeightShape(experts, n, k)
    found = []
    for route in _runtime.operator(OPERATOR).routes.get(arch, ()):
        sides = {key: side for key, side in route.where.items() if isinstance(side, tuple)}
        if all(sides[key][0] <= value <= sides[key][1] for key, value in (("n", n), ("k", k), ("experts", experts))):
            found.append(Interval(*sides["expert_rows"], route.program))
    if not found:
        known = ", ".join(_runtime.operator(OPERATOR).routes) or "none"
        raise NoProgramError(f"{OPERATOR}: no routes for {arch}; this registry has them for {known}")
    return sorted(found)


def _chosen(device: int, shape: WeightShape, expert_rows: int, invariant: bool, program: str | None) -> Kernel:
    if program is not None:
        return _named_kernel(device, program, shape)
    return _gemm_kernel(device, shape.n, shape.k, shape.experts, min(expert_rows, MAX_EXPERT_ROWS), invariant)


@lru_cache(maxsize=4096)
def _gemm_kernel(device: int, n: int, k: int, experts: int, expert_rows: int, invariant: bool) -> Kernel:
    arch = _runtime.architecture(device)
    intervals = route_intervals(n, k, experts, arch)
    if invariant and len(_families(intervals)) > 1:
        return _load(OPERATOR, device, intervals[-1].program)  # the one for the most rows, whatever is expected
    return _load(OPERATOR, device, routed_program(WeightShape(experts, n, k), expert_rows, arch))


def serves(program: Program, shape: WeightShape) -> bool:
    """Whether a program's own limit admits a weight shape."""
    limit = program.limit("k")
    return limit is None or shape.k <= limit


@lru_cache(maxsize=256)
def _named_kernel(device: int, program: str, shape: WeightShape) -> Kernel:
    found = _runtime.operator(OPERATOR).programs.get(program)
    if found is None:
        raise NoProgramError(f"{program}: no such program of {OPERATOR}; see `chord ls`")
    if not serves(found, shape):
        raise NoProgramError(f"{program}: serves k of at most {found.limit('k')}, got {shape.k}")
    return _load(OPERATOR, device, program)


def _families(intervals: list[Interval]) -> set[object]:
    """Main loops of the programs: those of one main loop give the same bits."""
    programs = _runtime.operator(OPERATOR).programs
    return {programs[interval.program].constants["loop"] for interval in intervals}


@lru_cache(maxsize=64)
def _mover(operator: str, device: int, blocks: int) -> Kernel:
    arch = _runtime.architecture(device)
    return _load(operator, device, _runtime.registry().lookup(operator, arch, {"num_blocks": blocks}).program_name)


def _move(operator: str, device: int, values: dict[str, int], shape: WeightShape) -> None:
    values |= {"n": shape.n, "k": shape.k, "gated": int(shape.gated), "num_blocks": shape.blocks}
    _launch(_mover(operator, device, shape.blocks), device, values)


def _load(operator: str, device: int, program: str) -> Kernel:
    version = _runtime.operator(operator).abi_version
    wanted = ABI_VERSION if operator == OPERATOR else LAYOUT_VERSION
    if version != wanted:
        raise ManifestError(
            f"{operator}: this chord expects version {wanted}, the manifest has {version}; install the chord and the "
            "registry that belong together"
        )
    return _runtime.registry().load(program, device=device)


@lru_cache(maxsize=1024)
def _bound(kernel: Kernel, values: tuple[tuple[str, int], ...], stream: int) -> PreparedLaunch:
    """A launch of exactly these values. Steady eager loops get the same addresses from torch's allocator every time."""
    return kernel.prepare(dict(values), stream=stream)


def _launch(kernel: Kernel, device: int, values: dict[str, int]) -> None:
    _bound(kernel, tuple(values.items()), _runtime.raw_stream(device))()
