"""Qualifying the present GPU for all operators: one list of suites, whichever command asks."""

from __future__ import annotations

from collections.abc import Callable

from chord.checks.qualify import Verdict, qualify_router
from chord.checks.qualify_w4a16 import qualify_w4a16

_CHECKS = {
    "fused_router": (
        "ids, weights and plan against the reference, ties and hostile inputs among them",
        "the same bits when launched again and by a graph's replay",
        "nothing written outside the outputs",
    ),
    "route_plan": ("every entry of the plan against the reference, absent experts among them",),
    "moe_w4a16": ("outputs against exact products: shapes, routings with absent experts, block sizes",),
    "moe_w4a16_combine": (
        "sums against exact products: shapes, routings with absent experts, tokens without any",
        "the bits of moe_w4a16 and moe_combine, and the same ones when launched again",
    ),
    "moe_w4a16_contiguous": ("outputs against exact products: shapes, spreads of rows, every way to tell of rows",),
    "moe_w4a16_masked": ("outputs against exact products: shapes, spreads of rows, slabs with room behind a count",),
    "moe_swiglu": ("every value against torch, rows that are not named untouched",),
    "moe_scatter": ("every value against torch, rows that are not named untouched",),
    "moe_combine": ("every value against torch, absent experts and places behind the limit among them",),
    "w4a16_pack": ("every byte against the reference packing",),
    "w4a16_unpack": ("every byte against what was packed",),
}


def checks_of(operator: str) -> tuple[str, ...]:
    """What the suites look at for an operator, in words."""
    return _CHECKS.get(operator, ("every output against the reference",))


def qualify_all(
    device: int,
    *,
    tiny: bool = False,
    brief: bool = False,
    only: str = "*",
    counts: tuple[int, ...] | None = None,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Verdicts of the router's programs, the route plan's, the W4A16 ones. As qualify_router."""
    verdicts = qualify_router(device, tiny=tiny, brief=brief, only=only, counts=counts, progress=progress)
    return verdicts + qualify_w4a16(device, tiny=tiny, brief=brief, only=only, progress=progress)
