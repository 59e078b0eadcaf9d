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
    """First and last value by range axis, such as block_m."""
    only: Mapping[str, Sequence[int | str]]
    """Values by choice axis; empty for all."""
    intervals: Sequence[Interval]


def replace_routes(text: str, arch: str, boxes: Sequence[Box], note: str) -> str:
    """The table's text with the routes of one architecture replaced. Routes of other architectures stay.

    Raises ImportError without tomlkit.
    """
    import tomlkit

    document = tomlkit.parse(text)
    kept = tomlkit.aot()
    for row in document.get("routes", []):
        others = [name for name in row["archs"] if name != arch]
        if others:
            if len(others) != len(row["archs"]):
                row["archs"] = others
            kept.append(row)
    for box in boxes:
        kept.append(_row(tomlkit, arch, box, note))
    document["routes"] = kept
    return re.sub(r"\n+\[\[routes\]\]", "\n\n[[routes]]", tomlkit.dumps(document))  # one blank line before each


def write_routes(path: Path, arch: str, boxes: Sequence[Box], note: str) -> None:
    """`replace_routes` on a file."""
    path.write_text(replace_routes(path.read_text(encoding="utf-8"), arch, boxes, note), encoding="utf-8")


def _row(tomlkit: Any, arch: str, box: Box, note: str) -> Any:  # noqa: ANN401 - an optional, untyped use
    row = tomlkit.table()
    row["archs"] = [arch]
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
