"""Writing routes into an operator's table (registry/<operator>.toml), leaving everything else as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chord.tune.routes import Interval


class Box(NamedTuple):
    """One [[routes]] table: intervals of the first range axis inside a box of the other axes."""

    ranges: Mapping[str, tuple[int, int]]
    """First and last value by range axis, such as block_m; absent: the whole axis."""
    only: Mapping[str, Sequence[int | str]]
    """Values by choice axis; absent: all."""
    intervals: Sequence[Interval]


class Axes(NamedTuple):
    """A table's domain by key."""

    ranges: Mapping[str, tuple[int, int]]
    steps: Mapping[str, int]
    choices: Mapping[str, Sequence[int | str]]


def replace_routes(text: str, arch: str, boxes: Sequence[Box], note: str, keep: str = "") -> str:
    """The table's text with the boxes' routes in the place of what one architecture had there.

    Its routes outside the boxes stay, cut where they reach into one; so do the routes of other architectures, and those
    that end before the range axis `keep` does, where the boxes are cut instead. Raises ImportError without tomlkit.
    """
    import tomlkit

    document = tomlkit.parse(text)
    whole = _axes(document.get("axes", []))
    kept = tomlkit.aot()
    for row in document.get("routes", []):
        if arch in row["archs"] and keep in row and row[keep][1] < whole.ranges[keep][1]:
            boxes = [rest for box in boxes for rest in without(box, _box_of(row), whole)]
    for row in document.get("routes", []):
        pieces = [_box_of(row)]
        if arch in row["archs"]:
            for box in boxes:
                pieces = [rest for piece in pieces for rest in without(piece, box, whole)]
        if pieces == [_box_of(row)]:
            kept.append(row)
            continue
        for piece in pieces:
            kept.append(_row(tomlkit, arch, piece, row.get("note", "")))
        others = [name for name in row["archs"] if name != arch]
        if others:
            row["archs"] = others
            kept.append(row)
    for box in boxes:
        kept.append(_row(tomlkit, arch, box, note))
    document["routes"] = kept
    return re.sub(r"\n+\[\[routes\]\]", "\n\n[[routes]]", tomlkit.dumps(document))  # one blank line before each


def without(piece: Box, cut: Box, whole: Axes) -> list[Box]:
    """What is left of `piece` when `cut` is taken out, in boxes that share nothing."""
    first, last = cut.intervals[0].first, cut.intervals[-1].last
    if not any(interval.first <= last and first <= interval.last for interval in piece.intervals):
        return [piece]
    ranges = {key: piece.ranges.get(key, whole.ranges[key]) for key in cut.ranges}
    choices = {key: piece.only.get(key, whole.choices[key]) for key in cut.only}
    apart = any(cut.ranges[key][0] > end or start > cut.ranges[key][1] for key, (start, end) in ranges.items())
    if apart or any(set(cut.only[key]).isdisjoint(values) for key, values in choices.items()):
        return [piece]
    left, inner = [], piece
    for key, values in choices.items():
        rest = [value for value in values if value not in cut.only[key]]
        if rest:
            left.append(inner._replace(only={**inner.only, key: rest}))
            inner = inner._replace(only={**inner.only, key: [value for value in values if value in cut.only[key]]})
    for key, (start, end) in ranges.items():
        low, high = max(start, cut.ranges[key][0]), min(end, cut.ranges[key][1])
        step = whole.steps[key]
        outside = [part for part in ((start, low - step), (high + step, end)) if part[0] <= part[1]]
        left += [inner._replace(ranges={**inner.ranges, key: part}) for part in outside]
        if outside:
            inner = inner._replace(ranges={**inner.ranges, key: (low, high)})
    kept = [
        Interval(start, end, arm)
        for interval_first, interval_last, arm in inner.intervals
        for start, end in (
            (interval_first, min(interval_last, first - 1)),
            (max(interval_first, last + 1), interval_last),
        )
        if start <= end
    ]
    return [*left, inner._replace(intervals=kept)] if kept else left


def _axes(axes: Sequence[Mapping[str, Any]]) -> Axes:
    ranges = {key: (axis["first"], axis["last"]) for axis in axes if "first" in axis for key in axis["keys"]}
    steps = {key: axis.get("step", 1) for axis in axes for key in axis["keys"]}
    choices = {
        key: list(dict.fromkeys(choice[place] for choice in axis["choices"]))
        for axis in axes
        if "choices" in axis
        for place, key in enumerate(axis["keys"])
    }
    return Axes(ranges, steps, choices)


def _box_of(row: Mapping[str, Any]) -> Box:
    ranges = {key: (value[0], value[1]) for key, value in row.items() if key not in ("archs", "note", "only", "table")}
    return Box(ranges, dict(row.get("only", {})), tuple(Interval(*line) for line in row["table"]))


def write_routes(path: Path, arch: str, boxes: Sequence[Box], note: str, keep: str = "") -> None:
    """`replace_routes` on a file."""
    path.write_text(replace_routes(path.read_text(encoding="utf-8"), arch, boxes, note, keep), encoding="utf-8")


def _row(tomlkit: Any, arch: str, box: Box, note: str) -> Any:  # noqa: ANN401 - an optional, untyped use
    row = tomlkit.table()
    row["archs"] = [arch]
    if note:
        row["note"] = note
    for key, (first, last) in box.ranges.items():
        row[key] = [first, last]
    if box.only:
        only = tomlkit.inline_table()
        only.update({key: list(values) for key, values in box.only.items()})
        row["only"] = only
    table = tomlkit.array()
    table.multiline(True)
    for interval in box.intervals:
        table.append([interval.first, interval.last, interval.arm])
    row["table"] = table
    return row
