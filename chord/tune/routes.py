"""Which arm serves which token counts, from times at some of them. Pure functions: no GPU, no files.

An arm is "general" where its program takes the number of tokens at run time, and "exact" where it is compiled for one.
General arms share the axis in intervals; exact ones replace them at single counts where that pays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

Times = Mapping[int, Mapping[str, float]]
"""Microseconds by number of tokens and arm."""


class Interval(NamedTuple):
    """Token counts first to last, both included, and the arm that serves them."""

    first: int
    last: int
    arm: str


def choose(
    general: Times, exact: Times, *, first: int, last: int, limits: Mapping[str, int], hysteresis: float = 0.03
) -> list[Interval]:
    """Intervals from `first` to `last` without gap or overlap.

    general, exact: measured times; arms that do not admit a count have none there.
    limits: most tokens of a general arm, where it has a limit.
    hysteresis: how much faster (as a share) something must be for a switch to be worth a line in the table.
    Raises ValueError when no general arm without a limit was timed at the largest count.
    """
    unlimited = {arm for times in general.values() for arm in times if limits.get(arm, last) >= last}
    intervals = _between(_cheapest_path(general, unlimited, hysteresis), limits, first, last)
    for count in sorted(exact):
        intervals = _replace_one(intervals, count, exact[count], general.get(count, {}), hysteresis)
    return intervals


def _cheapest_path(times: Times, final: Set[str], hysteresis: float) -> list[tuple[int, str]]:
    """An arm for each measured count: least sum of log times, where each change of arm costs log(1 + hysteresis).

    The last count goes to one of the `final` arms, which serve everything beyond it as well.
    """
    counts = sorted(count for count in times if times[count])
    if not counts or final.isdisjoint(times[counts[-1]]):
        raise ValueError("expected, at the largest count, the time of a general arm without a limit, got none")
    penalty = math.log1p(hysteresis)
    cost: dict[str, float] = {}
    steps: list[dict[str, str]] = []
    for count in counts:
        cheapest = min(sorted(cost), key=lambda arm: cost[arm], default="")
        entered, came_from = {}, {}
        for arm, us in sorted(times[count].items()):
            stay = cost.get(arm, math.inf)
            change = cost[cheapest] + penalty if cost else 0.0
            entered[arm] = min(stay, change) + math.log(us)
            came_from[arm] = arm if stay <= change else cheapest
        cost = entered
        steps.append(came_from)
    arm = min(sorted(final & cost.keys()), key=lambda name: cost[name])
    path = []
    for count, came_from in zip(reversed(counts), reversed(steps), strict=True):
        path.append((count, arm))
        arm = came_from[arm]
    return path[::-1]


def _between(path: Sequence[tuple[int, str]], limits: Mapping[str, int], first: int, last: int) -> list[Interval]:
    """Extends the choices at measured counts to all counts: a change lies at the geometric mean of its neighbours."""
    intervals = []
    start, (reached, arm) = first, path[0]
    for count, following in path[1:]:
        if following != arm:
            end = min(math.isqrt(reached * count), limits.get(arm, last))
            intervals.append(Interval(start, end, arm))
            start = end + 1
        reached, arm = count, following
    return [*intervals, Interval(start, last, arm)]


def _replace_one(
    intervals: Sequence[Interval],
    count: int,
    exact: Mapping[str, float],
    general: Mapping[str, float],
    hysteresis: float,
) -> list[Interval]:
    """Gives one count to its fastest exact arm, if that beats the general arm there by the hysteresis."""
    best = min(sorted(exact), key=lambda arm: exact[arm], default=None)
    result = []
    for interval in intervals:
        inside = interval.first <= count <= interval.last
        if best is None or not inside or exact[best] * (1 + hysteresis) > general.get(interval.arm, math.inf):
            result.append(interval)
            continue
        if interval.first < count:
            result.append(interval._replace(last=count - 1))
        result.append(Interval(count, count, best))
        if count < interval.last:
            result.append(interval._replace(first=count + 1))
    return result
