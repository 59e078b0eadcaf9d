"""Checks of the kernels that move, activate and sum rows: against torch, with poison around what is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from chord.w4a16.rows import combine_rows, scatter_rows, swiglu_rows

OPERATORS = ("moe_swiglu", "moe_scatter", "moe_combine")
SIZES = ((1, 8, 1), (5, 264, 8), (33, 512, 3), (64, 7168, 8), (300, 2048, 16))
TINY_SIZES = ((1, 8, 1), (5, 264, 8), (7, 512, 11))
"""(tokens or rows, columns, top_k)."""
POISON = 7.0
GUARD_ROWS = 2
TOLERANCE = 2.0**-7
"""Of a result, relative to the largest in its row: one rounding of bfloat16, and approximate exp2 and reciprocal."""

_FAR = 1 << 40
"""A limit far beyond any rows."""

Call = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], None]
"""Runs an operator into an output, on inputs that it moves to the output's device with the function given."""


def row_problems(operator: str, device: torch.device, *, tiny: bool = False) -> list[list[str]]:
    """What is wrong, by case; an empty list where nothing is."""
    found = []
    for rows, width, top_k in TINY_SIZES if tiny else SIZES:
        for what, call in _cases(operator, rows, width, top_k):
            label = f"{operator} {rows} x {width}, top_k {top_k}, {what}"
            found.append(
                [
                    f"{label}: {problem}"
                    for problem in _differences(call, _outputs(operator, rows, top_k), width, device)
                ]
            )
    return found


def _outputs(operator: str, rows: int, top_k: int) -> int:
    return rows * top_k if operator == "moe_scatter" else rows


def _differences(call: Call, rows: int, width: int, device: torch.device) -> list[str]:
    """Between the kernel's output and torch's, and around it."""
    wanted = torch.full((rows, width), POISON, dtype=torch.bfloat16)
    call(lambda tensor: tensor, wanted)
    memory = torch.full((rows + 2 * GUARD_ROWS, width), POISON, dtype=torch.bfloat16).to(device)
    call(lambda tensor: tensor.to(device), memory[GUARD_ROWS:-GUARD_ROWS])
    found = memory.cpu()
    inside, guards = found[GUARD_ROWS:-GUARD_ROWS].float(), torch.cat([found[:GUARD_ROWS], found[-GUARD_ROWS:]])
    problems = [] if (guards == POISON).all() else ["wrote outside its output"]
    scale = wanted.float().abs().amax(dim=1, keepdim=True)
    wrong = ~((inside - wanted.float()).abs() <= TOLERANCE * scale)
    kept = (wanted == POISON).all(dim=1)
    if (inside[kept] != POISON).any():
        problems.append("wrote a row that nothing names")
    if wrong.any():
        row = int(wrong.any(dim=1).nonzero()[0])
        problems.append(f"{int(wrong.sum())} entries differ, the first in row {row}")
    return problems


def _cases(operator: str, rows: int, width: int, top_k: int) -> Iterator[tuple[str, Call]]:
    random = torch.Generator().manual_seed(rows * width + top_k)
    makers = {"moe_swiglu": _swiglu_cases, "moe_scatter": _scatter_cases, "moe_combine": _combine_cases}
    yield from makers[operator](rows, width, top_k, random)


def _wrong(places: torch.Tensor) -> torch.Tensor:
    """Row ids of which a third are outside the rows: some just behind them, some as far as an int32 reaches."""
    count, wrong = places.numel(), places.clone().flatten()
    wrong[::3] = torch.where(wrong[::3] % 2 == 0, count + wrong[::3], 0x7FFFFFFF - wrong[::3])
    return wrong.view_as(places)


def _normal(random: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=random).to(torch.bfloat16)


def _swiglu_cases(rows: int, width: int, _: int, random: torch.Generator) -> Iterator[tuple[str, Call]]:
    gate_up = _normal(random, rows, 2 * width)
    gate_up[0, :width] *= 100.0  # silu saturates on both sides
    places = torch.randperm(rows, generator=random).to(torch.int32)
    places[rows // 3] = -1
    slabs = 3 if rows % 3 == 0 else 1
    counts = torch.randint(0, rows // slabs + 1, (slabs,), generator=random).to(torch.int32)
    for what, options in (
        ("every row", {}),
        ("an int64 limit", {"limit": torch.tensor([rows // 2])}),
        ("an int32 limit", {"limit": torch.tensor(rows - 1, dtype=torch.int32)}),
        ("row ids", {"row_ids": places}),
        ("counts of slabs", {"counts": counts}),
        ("ids and a limit that are wrong", {"row_ids": _wrong(places), "limit": torch.tensor([_FAR])}),
    ):
        yield what, lambda move, out, o=options: swiglu_rows(move(gate_up), out, **{k: move(v) for k, v in o.items()})  # type: ignore[misc]


def _scatter_cases(rows: int, width: int, top_k: int, random: torch.Generator) -> Iterator[tuple[str, Call]]:
    x = _normal(random, rows, width)
    places = torch.randperm(rows * top_k, generator=random).to(torch.int32).view(rows, top_k)
    yield "every pair", lambda move, out: scatter_rows(move(x), out, move(places))
    limit, some = torch.tensor([rows * top_k // 2]), places.clone()
    some[0, 0] = -1
    yield "a limit", lambda move, out: scatter_rows(move(x), out, move(some), limit=move(limit))
    far, wrong = torch.tensor([_FAR]), _wrong(places)
    yield "ids and a limit that are wrong", lambda move, out: scatter_rows(move(x), out, move(wrong), limit=move(far))


def _combine_cases(rows: int, width: int, top_k: int, random: torch.Generator) -> Iterator[tuple[str, Call]]:
    pairs, experts = rows * top_k, 12
    routed = _normal(random, pairs, width)
    weights = torch.rand(rows, top_k, generator=random)
    ids = torch.randint(-1, experts, (rows, top_k), generator=random).to(torch.int32)
    ids[rows // 2] = -1
    missing = routed.clone()
    missing[(ids < 0).flatten()] = float("nan")
    experts_here = torch.full((experts,), -1, dtype=torch.int32)
    experts_here[3:9] = torch.arange(6, dtype=torch.int32)
    places = torch.randperm(pairs, generator=random).to(torch.int32).view(rows, top_k)
    limit = torch.tensor([pairs * 2 // 3])
    sorted_rows = routed.clone()
    sorted_rows[int(limit) :] = float("nan")

    def plain(move: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor) -> None:
        combine_rows(move(missing), out, move(weights), move(ids), num_experts=experts)

    def remote(move: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor) -> None:
        given = move(missing), out, move(weights), move(ids)
        combine_rows(*given, num_experts=experts, expert_map=move(experts_here))

    def sorted_places(move: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor) -> None:
        given = move(sorted_rows), out, move(weights), move(ids.clamp(min=0))
        combine_rows(*given, num_experts=experts, row_ids=move(places), limit=move(limit))

    def wrong_places(move: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor) -> None:
        given = move(routed), out, move(weights), move(ids.clamp(min=0))
        far = torch.tensor([_FAR])
        combine_rows(*given, num_experts=experts, row_ids=move(_wrong(places)), limit=move(far))

    yield "ids that are nobody's", plain
    yield "experts elsewhere", remote
    yield "sorted rows and a limit", sorted_places
    yield "ids and a limit that are wrong", wrong_places
