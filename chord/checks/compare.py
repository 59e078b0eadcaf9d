"""Exact comparison of router results with the reference. Each function lists what is wrong; an empty list is a pass.

The bar: ids equal the reference wherever two rank values differ by more than 2^-22 (times |r| above 1), equal inputs
tie to the lower id; weights within 1e-6 + 1e-5 * |w| given the ids; every integer output exact given the ids; nothing
outside a plan's valid extent touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chord.router import reference
from chord.router.plan import RoutePlan

RANK_TOLERANCE = 2.0**-22
WEIGHT_ATOL = 1e-6
WEIGHT_RTOL = 1e-5
POISON = 0x5A5A5A5A
"""What integer buffers hold before a run: no id, pair, count or offset has this value."""

_DENORMAL_STEP = 2.0**-149
_DENORMAL_LOGIT = -87.0  # below it a float32 score is denormal and carries few bits
_ROWS_EXPLAINED = 64
_PAIRS_ON_HOST = 1 << 14


def poisoned_plan(like: RoutePlan) -> RoutePlan:
    """A plan of the same shapes whose buffers hold POISON."""
    return RoutePlan(*(torch.full_like(tensor, POISON) for tensor in like))


def poison(plan: RoutePlan) -> None:
    """Fills a plan's buffers with POISON, before they are written again."""
    for tensor in plan:
        tensor.fill_(POISON)


def check_ids(topk_ids: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor) -> list[str]:
    """Ids [M, k] ascending, distinct, in range, and the right ones up to the rank tolerance."""
    experts, top_k = logits.shape[1], topk_ids.shape[1]
    outside = (topk_ids < 0) | (topk_ids >= experts)
    falling = topk_ids[:, 1:] <= topk_ids[:, :-1]
    different = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    for start in range(0, logits.shape[0], 1 << 16):
        rows = slice(start, start + (1 << 16))
        _, ranks = reference.selected_scores(logits[rows], bias)
        different[rows] = (reference.select(ranks, top_k) != topk_ids[rows]).any(1)
    flags = torch.stack([outside.any(), falling.any(), different.any()]).tolist()  # read back once
    if flags[0]:
        return [f"topk_ids: entries outside 0..{experts - 1}; {_first(topk_ids, outside)}"]
    if flags[1]:
        return [f"topk_ids: not ascending and distinct; {_first(topk_ids[:, 1:], falling)}"]
    if not flags[2]:
        return []
    problems = []
    suspects = different.nonzero().flatten()
    problems += _outside_tolerance(suspects, topk_ids, logits, bias)
    for row in suspects[:_ROWS_EXPLAINED].tolist():
        problems += _wrong_ties(row, topk_ids[row], logits[row], bias)
    return problems


def _outside_tolerance(
    rows: torch.Tensor, topk_ids: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor
) -> list[str]:
    """Rows that leave out an expert which ranks clearly above one that they took."""
    _, ranks = reference.selected_scores(logits[rows], bias)
    chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, topk_ids[rows].long(), True)
    lost_to_nan = (chosen & ranks.isnan()).any(1) & (~chosen & ~ranks.isnan()).any(1)
    infinity = float("inf")
    lowest = ranks.masked_fill(~chosen | ranks.isnan(), infinity).amin(1).double()
    highest = ranks.masked_fill(chosen | ranks.isnan(), -infinity).amax(1).double()
    slack = RANK_TOLERANCE * lowest.abs().clamp(min=1.0)
    slack = torch.where(slack.isfinite(), slack, torch.zeros_like(slack))
    wrong = lost_to_nan | (highest > lowest + slack)
    return [
        f"topk_ids[{row}]: {topk_ids[row].tolist()} leaves out rank value {high:.9g} but takes {low:.9g}"
        for row, low, high in zip(
            rows[wrong][:5].tolist(), lowest[wrong][:5].tolist(), highest[wrong][:5].tolist(), strict=True
        )
    ]


def _wrong_ties(row: int, chosen: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor) -> list[str]:
    """Experts with the same logit and bias (or with a NaN rank) must be taken from the lowest id on."""
    taken = set(chosen.tolist())
    groups: dict[tuple[float, float] | str, list[int]] = {}
    for expert, pair in enumerate(zip(logits.float().tolist(), bias.tolist(), strict=True)):
        nan = any(value != value for value in pair)
        groups.setdefault("nan" if nan else pair, []).append(expert)
    problems = []
    for members in groups.values():
        inside = [expert for expert in members if expert in taken]
        outside = [expert for expert in members if expert not in taken]
        if inside and outside and max(inside) > min(outside):
            problems.append(f"topk_ids[{row}]: takes {max(inside)} but not {min(outside)}, which ties with it")
    return problems


def check_weights(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor,
    renormalize: bool,
    routed_scaling_factor: float,
) -> list[str]:
    """Weights [M, k] right for the given (valid) ids. Denormal scores may be off by a step of the denormal numbers."""
    ids = topk_ids.long()
    taken = logits.float().gather(1, ids)
    score, _ = reference.selected_scores(taken, torch.zeros((), device=bias.device))
    score = torch.where((taken + bias[ids]).isnan(), torch.zeros_like(score), score)
    expected = reference.weights(score, renormalize, routed_scaling_factor)
    allowed = WEIGHT_ATOL + WEIGHT_RTOL * expected.abs().double()
    if renormalize:
        total = score.double().sum(1, keepdim=True)
        rough = ((taken < _DENORMAL_LOGIT) & taken.isfinite()).sum(1, keepdim=True)
        steps = rough * 2 * _DENORMAL_STEP / total * abs(routed_scaling_factor)
        allowed = allowed + torch.where(rough > 0, steps, torch.zeros_like(steps))
    error = (topk_weights.double() - expected.double()).abs()
    wrong = ~(error <= allowed)  # a NaN weight is wrong as well
    if not bool(wrong.any()):
        return []
    row, route = wrong.nonzero()[0].tolist()
    return [
        f"topk_weights[{row}, {route}]: expected {expected[row, route].item():.9g},"
        f" got {topk_weights[row, route].item():.9g}; {int(wrong.sum())} wrong entries"
    ]


def check_plan(
    plan: RoutePlan,
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    expert_map: torch.Tensor | None = None,
) -> list[str]:
    """Every entry of a plan that was poisoned before the run: exact given the ids, poison left beyond the extent."""
    if plan.sorted_token_ids.is_cuda and topk_ids.numel() <= _PAIRS_ON_HOST:
        plan, topk_ids, expert_map = _on_host(plan, topk_ids, expert_map)
    expected = poisoned_plan(plan)
    reference.fill_route_plan(expected, topk_ids, num_experts, block_m, expert_map)
    problems = []
    for name in differing(RoutePlan._fields, expected, plan):
        want, got = getattr(expected, name), getattr(plan, name)
        wrong = want != got
        place = int(wrong.nonzero()[0])
        extent = int(expected.num_tokens_post_padded)
        problems.append(
            f"plan.{name}[{place}]: expected {_shown(want[place])}, got {_shown(got[place])};"
            f" {int(wrong.sum())} of {want.numel()} entries differ, valid extent {extent}"
        )
    return problems


def _on_host(
    plan: RoutePlan, topk_ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[RoutePlan, torch.Tensor, torch.Tensor | None]:
    """The same in the host's memory, by one copy: for a few pairs the reference is quicker there than its launches."""
    tensors = (*plan, topk_ids, *(() if expert_map is None else (expert_map,)))
    sizes = [tensor.numel() for tensor in tensors]
    copied = torch.cat([tensor.flatten() for tensor in tensors]).cpu().split(sizes)  # type: ignore[no-untyped-call]
    *made, ids = (part.view_as(tensor) for part, tensor in zip(copied, tensors[: len(plan) + 1], strict=False))
    return RoutePlan(*made), ids, None if expert_map is None else copied[-1]


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bitwise equality; NaNs with the same bits are equal, zeros of unlike sign are not."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def differing(names: Sequence[str], mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> list[str]:
    """Names of the tensors that have not the same bits. Reads back once, however many there are."""
    pairs = list(zip(names, mine, theirs, strict=True))
    alike = [(a.shape, a.dtype) == (b.shape, b.dtype) for _, a, b in pairs]
    flags = [(_bits(a) != _bits(b)).any() for (_, a, b), same in zip(pairs, alike, strict=True) if same]
    differ = iter(torch.stack(flags).tolist() if flags else ())
    return [name for (name, _, _), same in zip(pairs, alike, strict=True) if not same or next(differ)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.uint8)


def _shown(value: torch.Tensor) -> str:
    number = int(value)
    return f"{number} (untouched)" if number == POISON else str(number)


def _first(values: torch.Tensor, where: torch.Tensor) -> str:
    place = where.nonzero()[0].tolist()
    return f"first at {place}: {values[tuple(place)].item()}; {int(where.sum())} in all"
