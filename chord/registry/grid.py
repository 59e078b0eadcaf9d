"""How many blocks a launch gets, from a kernel's grid rule."""

from __future__ import annotations

from chord.registry.schema import GridRule

MAX_BLOCKS = 2**31 - 1
"""Largest grid.x that CUDA allows."""


def blocks(rule: GridRule, cluster: int, value: int, resident: int | None, multiprocessors: int | None) -> int:
    """grid.x: at least one cluster, a whole number of clusters.

    value: of the parameter that the rule follows (ignored when the number is constant).
    resident: blocks that the device holds at once, for co_resident. multiprocessors: for max_per_sm.
    """
    wanted = max(rule.blocks if rule.param is None else -(-value // rule.per), 1)
    limit = MAX_BLOCKS if rule.max is None else rule.max
    if rule.max_per_sm is not None and multiprocessors is not None:
        limit = min(limit, rule.max_per_sm * multiprocessors)
    if resident is not None:
        limit = min(limit, resident)
    return min(-(-wanted // cluster), max(limit // cluster, 1)) * cluster
