"""Routes as boxes in an operator's domain: checked for gaps and overlaps, and cut into a tree that a lookup bisects.

Choice axes are enumerated; the range axes of one combination of choices are cut, one axis after another, at every place
where a route begins or ends. The leaves of that tree are the cells of the domain, each with the programs of its routes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

from chord.registry.schema import Axis, Constant, Route

Interval = tuple[int, int]
"""First and last value, both included."""

Combination = tuple[Constant, ...]
"""One value per choice key, in the order of `Domain.choice_keys`."""

_FEW_BOXES = 64
"""Boxes of a combination up to which each is compared with every other."""

MAX_COMBINATIONS = 4096
MAX_CELLS = 1 << 18
"""Combinations of choices, and cells of an architecture: far above any operator's; no manifest may cost minutes."""


@dataclass(frozen=True)
class Domain:
    """An operator's axes, the choices apart from the ranges."""

    choice_keys: tuple[str, ...]
    combinations: tuple[Combination, ...]
    ranges: tuple[Axis, ...]

    @classmethod
    def of(cls, axes: Sequence[Axis]) -> Domain:
        choices = [axis for axis in axes if axis.choices]
        return cls(
            choice_keys=tuple(key for axis in choices for key in axis.keys),
            combinations=tuple(sum(rows, ()) for rows in product(*(axis.choices for axis in choices))),
            ranges=tuple(axis for axis in axes if not axis.choices),
        )

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(self.choice_keys).union(axis.keys[0] for axis in self.ranges)

    @cached_property
    def known(self) -> frozenset[Combination]:
        """`combinations`, to look one up."""
        return frozenset(self.combinations)


@dataclass(frozen=True)
class Box:
    """The part of a route that lies on the range axes, in their order."""

    sides: tuple[Interval, ...]
    program: str


@dataclass(frozen=True)
class Split:
    """One range axis, cut: `children[i]` serves the values from `starts[i]` up to the next start."""

    starts: tuple[int, ...]
    children: tuple[Split | tuple[str, ...], ...]

    def child(self, value: int) -> Split | tuple[str, ...]:
        """The subtree of a value, which must lie on the axis."""
        return self.children[bisect_right(self.starts, value) - 1]


Tree = Split | tuple[str, ...]
"""A leaf holds the programs of every route that covers the cell: exactly one when the routes are right."""


def check_axes(axes: Sequence[Axis]) -> list[str]:
    """What is wrong with the axes themselves; empty when nothing is."""
    problems = []
    seen: set[str] = set()
    for axis in axes:
        name = "/".join(axis.keys) or "(no key)"
        if not axis.keys or seen.intersection(axis.keys) or len(set(axis.keys)) != len(axis.keys):
            problems.append(f"axis {name}: expected one or more keys that no other axis has")
        seen.update(axis.keys)
        if axis.choices:
            if any(len(row) != len(axis.keys) for row in axis.choices):
                problems.append(f"axis {name}: expected {len(axis.keys)} values in every choice")
            if len(set(axis.choices)) != len(axis.choices):
                problems.append(f"axis {name}: a choice is listed twice")
        elif len(axis.keys) != 1:
            problems.append(f"axis {name}: a range has exactly one key")
        elif axis.last < axis.first or (axis.last - axis.first) % axis.step:
            problems.append(f"axis {name}: {axis.first}..{axis.last} is not a range of steps of {axis.step}")
    combinations = prod(len(axis.choices) for axis in axes if axis.choices)
    if combinations > MAX_COMBINATIONS:
        problems.append(f"axes: {combinations} combinations of choices, expected at most {MAX_COMBINATIONS}")
    return problems


def check_cover(axes: Sequence[Axis], routes: Sequence[Route]) -> list[str]:
    """Faults of one architecture's routes, each naming a route or a cell; empty when every problem has one route."""
    problems = check_axes(axes)
    if problems:
        return problems
    domain = Domain.of(axes)
    for route in routes:
        problems.extend(_check_route(domain, route))
    if problems:
        return problems
    boxes = _boxes_of(domain, routes)
    if all(_fill(domain.ranges, found) for found in boxes.values()):
        return []
    most = _most_cells(domain, routes)
    if most > MAX_CELLS:
        return [f"the routes' bounds cut the domain into as many as {most} cells, expected at most {MAX_CELLS}"]
    for combination, found in boxes.items():
        for sides, programs in _cells(domain.ranges, _split(domain.ranges, 0, found)):
            if len(programs) != 1:
                fault = f"more than one route ({', '.join(programs)})" if programs else "no route"
                problems.append(f"{_cell_text(domain, combination, sides)}: {fault}")
    return problems


def _fill(ranges: tuple[Axis, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes inside the ranges are known to cover each cell once: few, none meets another, and all together are
    as large as the whole. Much quicker than a tree, which can say where they do not.
    """
    if len(boxes) > _FEW_BOXES:
        return False
    ordered = sorted(box.sides for box in boxes)
    for place, sides in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if ranges and other[0][0] > sides[0][1]:
                break  # so do all that come after
            if all(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(sides, other, strict=True)):
                return False
    steps = [axis.step for axis in ranges]
    whole = prod((axis.last - axis.first) // axis.step + 1 for axis in ranges)
    return whole == sum(
        prod((b - a) // step + 1 for (a, b), step in zip(box.sides, steps, strict=True)) for box in boxes
    )


def _most_cells(domain: Domain, routes: Sequence[Route]) -> int:
    """An upper bound of the cells in all trees: every bound of a combination's routes may cut every other's."""
    cuts: dict[Combination, list[set[int]]] = {}
    for route in routes:
        combination = cast(Combination, tuple(route.where[key] for key in domain.choice_keys))
        sides = cuts.setdefault(combination, [{axis.first} for axis in domain.ranges])
        for axis, starts in zip(domain.ranges, sides, strict=True):
            first, last = cast(Interval, route.where[axis.keys[0]])
            starts.update((first, last + axis.step))
    return sum(prod(map(len, sides)) for sides in cuts.values())


def build_trees(domain: Domain, routes: Sequence[Route]) -> dict[Combination, Tree]:
    """One tree per combination of choices. The routes' keys and bounds must have been checked."""
    boxes = _boxes_of(domain, routes)
    return {combination: _split(domain.ranges, 0, found) for combination, found in boxes.items()}


def _boxes_of(domain: Domain, routes: Sequence[Route]) -> dict[Combination, list[Box]]:
    boxes: dict[Combination, list[Box]] = {combination: [] for combination in domain.combinations}
    for route in routes:
        combination = cast(Combination, tuple(route.where[key] for key in domain.choice_keys))
        sides = cast("tuple[Interval, ...]", tuple(route.where[axis.keys[0]] for axis in domain.ranges))
        boxes[combination].append(Box(sides, route.program))
    return boxes


def _split(ranges: tuple[Axis, ...], depth: int, boxes: list[Box]) -> Tree:
    if depth == len(ranges):
        return tuple(box.program for box in boxes)
    axis = ranges[depth]
    starts = {axis.first}
    for box in boxes:
        first, last = box.sides[depth]
        starts.update(start for start in (first, last + axis.step) if start <= axis.last)
    ordered = tuple(sorted(starts))
    children = []
    for start in ordered:
        inside = [box for box in boxes if box.sides[depth][0] <= start <= box.sides[depth][1]]
        children.append(_split(ranges, depth + 1, inside))
    return Split(ordered, tuple(children))


def _cells(ranges: tuple[Axis, ...], tree: Tree) -> Iterator[tuple[tuple[Interval, ...], tuple[str, ...]]]:
    if isinstance(tree, tuple):
        yield (), tree
        return
    axis, *rest = ranges
    ends = [start - axis.step for start in tree.starts[1:]] + [axis.last]
    for start, end, child in zip(tree.starts, ends, tree.children, strict=True):
        for sides, programs in _cells(tuple(rest), child):
            yield ((start, end), *sides), programs


def _check_route(domain: Domain, route: Route) -> Iterator[str]:
    name = f"route of {route.program}"
    if route.where.keys() != domain.keys:
        yield f"{name}: expected the keys {', '.join(sorted(domain.keys))}, got {', '.join(sorted(route.where))}"
        return
    for axis in domain.ranges:
        side = route.where[axis.keys[0]]
        if not isinstance(side, tuple) or not _on_axis(axis, side):
            yield (
                f"{name}: {axis.keys[0]} = {side!r}, expected [first, last] inside {axis.first}..{axis.last} "
                f"in steps of {axis.step}"
            )
    combination = tuple(route.where[key] for key in domain.choice_keys)
    if combination not in domain.known:
        pairs = ", ".join(f"{key}={value}" for key, value in zip(domain.choice_keys, combination, strict=True))
        yield f"{name}: {pairs} is not among the axes' choices"


def _on_axis(axis: Axis, side: Interval) -> bool:
    first, last = side
    aligned = (first - axis.first) % axis.step == 0 and (last - axis.first) % axis.step == 0
    return aligned and axis.first <= first <= last <= axis.last


def _cell_text(domain: Domain, combination: Combination, sides: tuple[Interval, ...]) -> str:
    parts = [f"{key}={value}" for key, value in zip(domain.choice_keys, combination, strict=True)]
    parts += [f"{axis.keys[0]}={first}..{last}" for axis, (first, last) in zip(domain.ranges, sides, strict=True)]
    return ", ".join(parts)
