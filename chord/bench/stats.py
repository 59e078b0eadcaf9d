"""Statistics of samples: order statistics, and means of ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """Of samples in one unit."""

    median: float
    p10: float
    p90: float
    samples: int


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted samples lie, linear in between. Raises ValueError without samples."""
    if not ordered:
        raise ValueError("expected at least one sample, got none")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(samples: Iterable[float]) -> Summary:
    """Median, 10th and 90th percentile."""
    ordered = sorted(samples)
    return Summary(quantile(ordered, 0.5), quantile(ordered, 0.1), quantile(ordered, 0.9), len(ordered))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Raises ValueError without ratios, or for one that is not positive."""
    logs = [math.log(ratio) for ratio in ratios]
    if not logs:
        raise ValueError("expected at least one ratio, got none")
    return math.exp(math.fsum(logs) / len(logs))
