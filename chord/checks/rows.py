"""Qualifying the kernels that move rows (moe_swiglu, moe_scatter, moe_combine): as they are routed, against torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from chord import _runtime
from chord.checks.qualify import Verdict, matches
from chord.w4a16.rows import combine_rows, scatter_rows, swiglu_rows

OPERATORS = ("moe_swiglu", "moe_scatter", "moe_combine")
SIZES = ((0, 8), (1, 8), (3, 264), (17, 2048), (300, 7168))
"""(rows or tokens, columns of the output)."""
TINY_SIZES = ((0, 8), (3, 264))
TOP_K = 4
EXPERTS = 8
POISON = 0x7FC1
"""A bfloat16 NaN that no sum gives."""
RELATIVE = 2.0**-7
"""One unit in the last place of a bfloat16: float32 sums may round to either neighbour."""

Arguments = dict[str, Any]


def qualify_rows(
    device: int,
    *,
    tiny: bool = False,
    only: str = "*",
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Runs the programs that a registry routes on this device, made and judged on the host; nothing without them."""
    arch = _runtime.architecture(device)
    place = torch.device("cuda", device)
    verdicts = []
    with torch.cuda.device(device):
        for operator in OPERATORS:
            if operator not in _runtime.registry().manifest.operators:
                continue
            for name, program in _runtime.registry().programs(operator, arch).items():
                if matches(name, only):
                    cases = [list(row_problems(operator, rows, width, place)) for rows, width in _sizes(tiny)]
                    found = [problem for problems in cases for problem in problems]
                    verdicts.append(Verdict(name, arch, program.builds[arch].cubin_sha256, len(cases), found))
                    progress(verdicts[-1])
    return verdicts


def row_problems(operator: str, rows: int, width: int, device: torch.device) -> Iterator[str]:
    """What is wrong with an operator's result at a size; every element counts, those left alone among them."""
    function, variants = _CALLS[operator]
    for what, given, out_rows in variants(rows, width):
        want, got = (_run(function, given, out_rows, width, place) for place in (torch.device("cpu"), device))
        untouched = want.view(torch.int16) == POISON
        if not torch.equal(untouched, got.view(torch.int16) == POISON):
            yield f"{rows} x {width} {what}: writes other rows than those that are named"
            continue
        wrong = (got.float() - want.float()).abs() > RELATIVE * want.float().abs() + 1e-3 * RELATIVE
        wrong |= got.isnan()
        if bool((wrong & ~untouched).any()):
            yield f"{rows} x {width} {what}: {int((wrong & ~untouched).sum())} values differ"


def _sizes(tiny: bool) -> tuple[tuple[int, int], ...]:
    return TINY_SIZES if tiny else SIZES


def _run(function: Callable[..., None], given: Arguments, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """The output on the host, poison where nothing was written."""
    out = torch.full((rows, width), POISON, dtype=torch.int16, device=device).view(torch.bfloat16)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    function(out=out, **moved)
    return out.cpu()


def _drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def _places(rows: int, seed: int) -> torch.Tensor:
    """[rows] int32: each of 0 to rows - 1 once, in any order."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def _swiglu(rows: int, width: int) -> Iterator[tuple[str, Arguments, int]]:
    x = _drawn(rows, 2 * width)
    yield "all rows", {"gate_up": x}, rows
    ids = torch.where(torch.arange(rows) % 3 == 1, -1, _places(rows, 1)).to(torch.int32)
    yield "some rows", {"gate_up": x, "row_ids": ids}, rows
    yield "up to a limit", {"gate_up": x, "limit": torch.tensor([rows // 2])}, rows
    if rows:
        counts = torch.tensor([rows // 2], dtype=torch.int32)
        yield "of a slab", {"gate_up": x, "counts": counts}, rows


def _scatter(tokens: int, width: int) -> Iterator[tuple[str, Arguments, int]]:
    pairs = tokens * TOP_K
    given = {"x": _drawn(tokens, width), "row_ids": _places(pairs, 2).view(tokens, TOP_K)}
    yield "all pairs", given, pairs
    yield "up to a limit", given | {"limit": torch.tensor(pairs // 2, dtype=torch.int32)}, pairs


def _combine(tokens: int, width: int) -> Iterator[tuple[str, Arguments, int]]:
    pairs, generator = tokens * TOP_K, torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, TOP_K, generator=generator)
    given = {
        "rows": _drawn(pairs, width).abs(),
        "weights": weights,
        "topk_ids": ids,
        "num_experts": EXPERTS,
    }  # fmt: skip - no signs: a sum that cancels has no digits to compare
    yield "as they lie", given, tokens
    local = torch.where(torch.arange(EXPERTS) % 2 == 0, torch.arange(EXPERTS), -1).to(torch.int32)
    placed = {"row_ids": _places(pairs, 3).view(tokens, TOP_K), "limit": torch.tensor([pairs - pairs // 4])}
    yield "from places, of some experts", given | {"expert_map": local} | placed, tokens


_CALLS: dict[str, tuple[Callable[..., None], Callable[[int, int], Iterator[tuple[str, Arguments, int]]]]] = {
    "moe_swiglu": (swiglu_rows, _swiglu),
    "moe_scatter": (scatter_rows, _scatter),
    "moe_combine": (combine_rows, _combine),
}
