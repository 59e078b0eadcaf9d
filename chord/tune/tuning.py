"""What a tuner hands over: measurements, routes for what was measured to the end, and what went wrong on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from chord import _paths
from chord.bench.results import Results, file_name, write
from chord.tune.table import Box, write_routes


@dataclass
class Tuning:
    """What a sweep came to, whole or cut short."""

    operator: str
    arch: str
    results: Results
    boxes: list[Box] = field(default_factory=list)
    """Routes of the classes that were measured to the end."""
    boxes_of: dict[str, list[Box]] = field(default_factory=dict)
    """Routes of operators that borrow the arms, where theirs differ."""
    kept: str = ""
    """The range axis whose beginning no sweep measures: routes that end before the axis does stay as they are."""
    problems: list[str] = field(default_factory=list)
    """Programs and counts that were left out, and why."""
    stopped: str = ""
    """Why the sweep ended early; empty if it did not."""
    lost: bool = False
    """Whether a kernel made the GPU unusable for this process."""


def results_path(results: Results, folder: Path) -> Path:
    """Where a tuner's results belong."""
    return folder / file_name(results, "tune")


def write_tuned(tuning: Tuning, folder: Path, table: Path | None = None) -> Path:
    """Writes the results file into `folder` and the routes, if there are any, into the table and into those that
    borrow its arms: the same kernels on rows that come in another way. Returns the results file's path.

    The table is registry/<operator>.toml unless named; `chord build` then checks it and renews the manifest.
    """
    path = results_path(tuning.results, folder)
    write(tuning.results, path)
    note = f"measured on {tuning.results.gpu}, {tuning.results.date}, bench/results/{path.name}"
    if tuning.boxes:
        own = table or _paths.registry_dir() / f"{tuning.operator}.toml"
        write_routes(own, tuning.arch, tuning.boxes, note, tuning.kept)
        for each in borrowers(tuning.operator, own.parent):
            write_routes(
                each, tuning.arch, tuning.boxes_of.get(each.stem, tuning.boxes), f"as {tuning.operator}: {note}"
            )
    return path


def borrowers(operator: str, folder: Path) -> list[Path]:
    """Tables of a folder whose arms are an operator's."""
    import tomlkit

    found = []
    for path in sorted(folder.glob("*.toml")):
        borrowed = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap().get("borrow", [])
        if any(row.get("operator") == operator for row in borrowed):
            found.append(path)
    return found
