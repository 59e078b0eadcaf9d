"""Measured ratios to the best peer against the goals in bench/goals.json, one line for each scenario and projection."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from chord.bench.report import Comparison, compare, size_of, table_line
from chord.bench.results import Results
from chord.bench.stats import geometric_mean


class Goal(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How many times as fast as the best peer a cell is to be. size: tokens, or rows an expert."""

    suite: str
    scenario: str
    proj: str | None = None
    size: int
    ratio: float


class Line(NamedTuple):
    """One line: ratios of the cells that have a peer, and goals of those that have one."""

    what: str
    peer: str
    ratios: list[float]
    goals: list[tuple[float, float]]
    """(ratio, goal) of the cells with both."""


def read_goals(path: Path) -> list[Goal]:
    """Raises ValueError naming the file where it cannot be read, or is not a list of goals."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Goal])
    except OSError as error:
        raise ValueError(f"{path}: expected a file of goals beside the results' folder ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a file of goals ({error})") from error


def summary_table(lines: Iterable[Line]) -> str:
    """A markdown table. Cells whose peer could not be measured do not count."""
    head = ["what", "against", "cells", "geometric mean", "worst", "best", "goal (same cells)", "cells at their goal"]
    table = [table_line(head), table_line(["---", "---", *["---:"] * (len(head) - 2)])]
    for line in lines:
        cells = [line.what, line.peer, str(len(line.ratios)), f"{geometric_mean(line.ratios):.2f}x"]
        cells += [f"{min(line.ratios):.2f}x", f"{max(line.ratios):.2f}x"]
        if line.goals:
            reached = geometric_mean(ratio for ratio, _ in line.goals)
            wanted = geometric_mean(goal for _, goal in line.goals)
            met = sum(ratio >= goal for ratio, goal in line.goals)
            cells += [f"{reached:.2f}x of {wanted:.2f}x", f"{met} of {len(line.goals)}"]
        else:
            cells += ["", ""]
        table.append(table_line(cells))
    return "\n".join(table) + "\n"


def lines_of(
    results: Results, scenario: str, goals: Iterable[Goal], recorded: Results | None = None, label: str = ""
) -> list[Line]:
    """The lines of a scenario, one for each projection. recorded: of a peer that cannot run here, which then counts."""
    found = compare(results, scenario, recorded)
    wanted = {
        (goal.proj, goal.size): goal.ratio for goal in goals if (goal.suite, goal.scenario) == (results.suite, scenario)
    }
    lines = []
    for proj in dict.fromkeys(comparison.row.proj for comparison in found):
        cells = [(c, ratio) for c in found if c.row.proj == proj and (ratio := _ratio(c, recorded)) is not None]
        if cells:
            with_goal = [(ratio, wanted[key]) for c, ratio in cells if (key := (proj, size_of(c.row))) in wanted]
            what = " ".join(part for part in (results.suite, scenario, proj) if part)
            peer = label or "best peer of the run"
            lines.append(Line(what, peer, [ratio for _, ratio in cells], with_goal))
    return lines


def _ratio(comparison: Comparison, recorded: Results | None) -> float | None:
    return comparison.ratio if recorded is None else comparison.recorded_ratio
