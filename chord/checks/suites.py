"""Qualifying the present GPU for all operators: one list of suites, whichever command asks."""

from __future__ import annotations

from collections.abc import Callable

from chord.checks.qualify import Verdict, qualify_router
from chord.checks.qualify_w4a16 import qualify_w4a16


def qualify_all(
    device: int,
    *,
    tiny: bool = False,
    only: str = "*",
    counts: tuple[int, ...] | None = None,
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Verdicts of the router's programs, the route plan's, then the W4A16 ones. Arguments as qualify_router."""
    verdicts = qualify_router(device, tiny=tiny, only=only, counts=counts, progress=progress)
    return verdicts + qualify_w4a16(device, tiny=tiny, only=only, progress=progress)
