"""From a problem to its program: a pure function of the manifest, total over the operator's domain, in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import cast

from chord.errors import NoProgramError
from chord.registry.architectures import ordered
from chord.registry.boxes import Combination, Domain, Split, Tree, build_trees
from chord.registry.schema import Axis, Operator

_SHOWN_BITS = 128
"""Larger numbers are not written out: Python refuses to, from some thousand digits on."""


class RouteIndex:
    """One operator's routes, ready to be searched. Trees are built when an architecture is first asked for."""

    def __init__(self, name: str, operator: Operator) -> None:
        self._name = name
        self._operator = operator
        self._domain = Domain.of(operator.axes)
        self._trees: dict[str, dict[Combination, Tree]] = {}

    def find(self, arch: str, problem: Mapping[str, object]) -> str:
        """Name of the program that serves `problem`, a value for each of the operator's keys.

        Raises NoProgramError, which names the key, its value, what is allowed and the nearest thing that exists.
        """
        trees = self._trees.get(arch) or self._index(arch)
        if len(problem) != len(self._domain.keys):
            raise self._wrong_keys(problem)
        try:
            values = [problem[axis.keys[0]] for axis in self._domain.ranges]
            tree = trees.get(cast(Combination, tuple(problem[key] for key in self._domain.choice_keys)))
        except KeyError:
            raise self._wrong_keys(problem) from None
        except TypeError:  # a value that cannot be hashed is no choice either
            tree = None
        if tree is None:
            raise self._wrong_choice(problem)
        for axis, value in zip(self._domain.ranges, values, strict=True):
            tree = cast(Split, tree).child(self._on_axis(axis, value))
        return cast("tuple[str, ...]", tree)[0]

    def _index(self, arch: str) -> dict[Combination, Tree]:
        routes = self._operator.routes.get(arch)
        if routes is None:
            raise NoProgramError(
                f"{self._name} has no programs for architecture {arch!r}: needs {arch!r}, "
                f"has {_listed(ordered(self._operator.routes))}; architecture names are matched exactly"
            )
        return self._trees.setdefault(arch, build_trees(self._domain, routes))

    def _on_axis(self, axis: Axis, value: object) -> int:
        try:
            number = index(value)  # type: ignore[arg-type]
        except TypeError:
            raise NoProgramError(
                f"{self._name}: {axis.keys[0]}={value!r} is not a whole number; expected {_range_text(axis)}"
            ) from None
        if axis.first <= number <= axis.last and (number - axis.first) % axis.step == 0:
            return number
        steps = round((min(max(number, axis.first), axis.last) - axis.first) / axis.step)
        nearest = axis.first + steps * axis.step
        shown = number if number.bit_length() <= _SHOWN_BITS else f"a number of {number.bit_length()} bits"
        raise NoProgramError(
            f"{self._name}: no program for {axis.keys[0]}={shown}; "
            f"allowed are {_range_text(axis)}, nearest is {nearest}"
        )

    def _wrong_keys(self, problem: Mapping[str, object]) -> NoProgramError:
        missing = sorted(self._domain.keys.difference(problem))
        unknown = sorted(set(problem).difference(self._domain.keys))
        faults = [f"{what} {_listed(keys)}" for what, keys in (("missing", missing), ("unknown", unknown)) if keys]
        return NoProgramError(
            f"{self._name}: a problem has the keys {_listed(sorted(self._domain.keys))}; {', '.join(faults)}"
        )

    def _wrong_choice(self, problem: Mapping[str, object]) -> NoProgramError:
        for axis in self._operator.axes:
            values = tuple(problem[key] for key in axis.keys)
            if axis.choices and values not in axis.choices:
                nearest = min(axis.choices, key=lambda row: _distance(row, values))
                allowed = "; ".join(_pairs(axis.keys, row) for row in axis.choices)
                return NoProgramError(
                    f"{self._name}: no program for {_pairs(axis.keys, values)}; allowed are {allowed}; "
                    f"nearest is {_pairs(axis.keys, nearest)}"
                )
        raise AssertionError("a combination of allowed choices has no tree")


def _distance(row: tuple[object, ...], values: tuple[object, ...]) -> float:
    """Sum over the keys of how far apart the values are, relative to their size; unlike words count 1."""
    total = 0.0
    for ours, theirs in zip(row, values, strict=True):
        if isinstance(ours, int) and isinstance(theirs, int):
            total += abs(ours - theirs) / max(abs(ours), abs(theirs), 1)
        else:
            total += float(ours != theirs)
    return total


def _pairs(keys: Iterable[str], values: Iterable[object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))


def _range_text(axis: Axis) -> str:
    every = "" if axis.step == 1 else f" in steps of {axis.step}"
    return f"{axis.first}..{axis.last}{every}"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"
