"""From a table's route rows to the manifest's routes: one box per combination of choices and row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from chord.build.planned import PlannedProgram
from chord.build.tables import Cells, RouteRow, Table
from chord.build.toolchain import ToolchainPin
from chord.registry.boxes import Combination, Domain, Interval, check_cover
from chord.registry.schema import Axis, Constant, Route

_SHOWN = 5
"""Gaps and overlaps that one error lists."""

Routes = dict[str, tuple[Route, ...]]


def plan_routes(
    table: Table, cells: Cells, domain: Domain, programs: Mapping[str, PlannedProgram], pin: ToolchainPin
) -> tuple[Routes, dict[str, str]]:
    """Routes and notes by architecture, in the pin's order; complete for every architecture that has programs.

    Raises TableError that names the row, or the cells of the domain with no route or more than one.
    """
    found: dict[str, list[Route]] = {}
    notes: dict[str, list[str]] = {}
    for index, row in enumerate(table.routes):
        cell = f"routes[{index}]"
        _check_row(row, cells, cell, domain, pin)
        for arch in row.archs:
            found.setdefault(arch, []).extend(_row_routes(row, cells, cell, domain, programs, arch))
            notes.setdefault(arch, []).append(row.note)
    declared = {arch for program in programs.values() for arch in program.architectures}
    routes = {arch: tuple(found.get(arch, ())) for arch in pin.architectures if arch in declared or arch in found}
    for arch, listed in routes.items():
        problems = check_cover(table.axes, listed)
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise cells.error("routes", f"{arch}: {'; '.join(problems[:_SHOWN])}{more}")
    return routes, {arch: "; ".join(dict.fromkeys(filter(None, notes.get(arch, ())))) for arch in routes}


def _check_row(row: RouteRow, cells: Cells, cell: str, domain: Domain, pin: ToolchainPin) -> None:
    if not domain.ranges:
        raise cells.error(cell, "expected an operator with at least one range axis")
    for position, arch in enumerate(row.archs):
        if arch not in pin.architectures or arch in row.archs[:position]:
            known = ", ".join(pin.architectures)
            raise cells.error(f"{cell}.archs[{position}]", f"expected one of {known}, each once, got {arch!r}")


def _row_routes(
    row: RouteRow,
    cells: Cells,
    cell: str,
    domain: Domain,
    programs: Mapping[str, PlannedProgram],
    arch: str,
) -> Iterator[Route]:
    first_axis, *other_axes = domain.ranges
    sides = {axis.keys[0]: row.ranges.get(axis.keys[0], (axis.first, axis.last)) for axis in other_axes}
    for axis in other_axes:
        _check_side(axis, sides[axis.keys[0]], cells, f"{cell}.{axis.keys[0]}")
    combinations = narrowed(domain, row.only, cells, cell)
    for position, (first, last, arm) in enumerate(row.table):
        line = f"{cell}.table[{position}]"
        _check_side(first_axis, (first, last), cells, line)
        box = {first_axis.keys[0]: (first, last), **sides}
        for combination in combinations:
            choices = dict(zip(domain.choice_keys, combination, strict=True))
            name = _serving(programs, arm, arch, choices, box, cells, line)
            yield Route(where={**choices, **box}, program=name)


def _check_side(axis: Axis, side: Interval, cells: Cells, cell: str) -> None:
    first, last = side
    aligned = (first - axis.first) % axis.step == 0 and (last - axis.first) % axis.step == 0
    if not (axis.first <= first <= last <= axis.last and aligned):
        raise cells.error(
            cell,
            f"{axis.keys[0]} = [{first}, {last}]: expected first <= last inside {axis.first}..{axis.last} "
            f"in steps of {axis.step}",
        )


def _serving(
    programs: Mapping[str, PlannedProgram],
    arm: str,
    arch: str,
    choices: Mapping[str, Constant],
    box: Mapping[str, Interval],
    cells: Cells,
    cell: str,
) -> str:
    """Name of the arm's program for a box: fixed constants must match it exactly, and the most specialised one wins."""
    fitting: dict[str, int] = {}
    for name, program in programs.items():
        if program.arm.name != arm or arch not in program.architectures:
            continue
        constants = program.axis_constants
        fixed = {key: value for key, value in constants.items() if key in box}
        if all(constants[key] == value for key, value in choices.items()) and all(
            box[key] == (value, value) for key, value in fixed.items()
        ):
            fitting[name] = len(fixed)
    most = max(fitting.values(), default=0)
    best = [name for name, count in fitting.items() if count == most]
    if len(best) == 1:
        return best[0]
    problem = ", ".join([*(f"{key}={value}" for key, value in choices.items()), *_sides(box)])
    if best:
        raise cells.error(cell, f"{problem} on {arch}: equally specialised programs of arm {arm}: {', '.join(best)}")
    theirs = [name for name, program in programs.items() if program.arm.name == arm and arch in program.architectures]
    raise cells.error(
        cell,
        f"{problem}: no program of arm {arm} serves all of it on {arch}; it has {', '.join(theirs) or 'none there'}",
    )


def _sides(box: Mapping[str, Interval]) -> Iterator[str]:
    for key, (first, last) in box.items():
        yield f"{key}={first}..{last}"


def narrowed(domain: Domain, only: Mapping[str, tuple[Constant, ...]], cells: Cells, cell: str) -> list[Combination]:
    """The combinations of choices whose values are all among those that `only` lists. Raises TableError."""
    for key, wanted in only.items():
        if key not in domain.choice_keys:
            raise cells.error(f"{cell}.only.{key}", f"expected a choice key: {', '.join(domain.choice_keys)}")
        position = domain.choice_keys.index(key)
        known = {combination[position] for combination in domain.combinations}
        unknown = [value for value in wanted if value not in known]
        if unknown or not wanted:
            listed = ", ".join(str(value) for value in sorted(known, key=str))
            raise cells.error(f"{cell}.only.{key}", f"expected one or more of {listed}, got {list(wanted)}")
    kept = []
    for combination in domain.combinations:
        values = dict(zip(domain.choice_keys, combination, strict=True))
        if all(values[key] in wanted for key, wanted in only.items()):
            kept.append(combination)
    if not kept:
        raise cells.error(f"{cell}.only", "no combination of the axes' choices has all of these values")
    return kept
