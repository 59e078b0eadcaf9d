"""A plot of time over tokens as SVG, written by hand: no plotting library, the same bytes for the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from chord.bench.report import compare, size_of
from chord.bench.results import Results

WIDTH, HEIGHT = 850, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 240, 40, 52
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#8d6a9f", "#e0a030")
FONT = 'font-family="sans-serif" font-size="12"'
TICKS_US = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000, 2000, 5000)

Points = Sequence[tuple[float, float]]


def router_series(
    results: Results, scenario: str, block_m: int, recorded: Results | None = None, label: str = "recorded"
) -> dict[str, Points]:
    """Lines of (tokens, us): chord, each peer, and the recorded peer scaled through SGLang."""
    series: dict[str, list[tuple[float, float]]] = {"chord": []}
    for comparison in compare(results, scenario, recorded):
        row = comparison.row
        if row.block_m != block_m or not row.tokens:
            continue
        series["chord"].append((row.tokens, row.us))
        for name, us in row.peers.items():
            series.setdefault(name, []).append((row.tokens, us))
        if comparison.recorded_ratio is not None:
            series.setdefault(label, []).append((row.tokens, row.us * comparison.recorded_ratio))
    return {name: sorted(points) for name, points in series.items() if points}


def layer_series(results: Results, scenario: str) -> dict[str, Points]:
    """Lines of (tokens, us) of whole layers: chord, and each peer."""
    series: dict[str, list[tuple[float, float]]] = {"chord": []}
    for row in results.rows:
        if row.scenario == scenario and row.tokens:
            series["chord"].append((row.tokens, row.us))
            for name, us in row.peers.items():
                series.setdefault(name, []).append((row.tokens, us))
    return {name: sorted(points) for name, points in series.items() if points}


def w4a16_series(results: Results, scenario: str, proj: str) -> dict[str, Points]:
    """Lines of (size, us) for a projection: chord and each peer. Size: tokens, or rows an expert."""
    series: dict[str, list[tuple[float, float]]] = {"chord": []}
    for row in results.rows:
        if row.scenario == scenario and row.proj == proj and size_of(row):
            series["chord"].append((size_of(row), row.us))
            for name, us in row.peers.items():
                series.setdefault(name, []).append((size_of(row), us))
    return {name: sorted(points) for name, points in series.items() if points}


def log_log(series: Mapping[str, Points], title: str, x_label: str = "tokens", y_label: str = "microseconds") -> str:
    """An SVG document with one line per series on two logarithmic axes. Raises ValueError without points."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    if not xs:
        raise ValueError("expected at least one point, got none")
    x_axis = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = _Scale(min(ys) / 1.15, max(ys) * 1.15, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_grid(xs, ys, x_axis, y_axis),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    for index, (name, points) in enumerate(series.items()):
        parts += _line(name, points, COLOURS[index % len(COLOURS)], index, x_axis, y_axis)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Scale:
    """A logarithmic axis: value to pixel."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        span = math.log(self.high / self.low) or 1.0
        return self.start + (self.end - self.start) * math.log(value / self.low) / span


def _grid(xs: Sequence[float], ys: Sequence[float], x_axis: _Scale, y_axis: _Scale) -> list[str]:
    parts = []
    power = 1
    while power <= max(xs):
        if power >= min(xs):
            x = x_axis(power)
            parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{power}</text>')
        power *= 2
    for tick in TICKS_US:
        if y_axis.low <= tick <= y_axis.high:
            y = y_axis(tick)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    return parts


def _line(name: str, points: Points, colour: str, index: int, x_axis: _Scale, y_axis: _Scale) -> list[str]:
    path = "L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y in points)
    marks = "".join(f'<circle cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="2.5"/>' for x, y in points)
    y = TOP + 14 + 20 * index
    return [
        f'<g fill="{colour}"><path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>{marks}',
        f'<path d="M{WIDTH - RIGHT + 14} {y}h22" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{WIDTH - RIGHT + 42}" y="{y + 4}">{escape(name)}</text></g>',
    ]
