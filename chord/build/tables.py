"""The operators' tables: TOML into typed rows. Unknown keys and wrong types are errors that name file, line and cell.

What the rows mean together (names, programs, routes) is worked out in plan.py and routes.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from chord.errors import TableError
from chord.registry.decoding import read_bounded
from chord.registry.schema import Axis, Constant, Positive

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Expression = int | str
"""A number, or a Jinja expression over the program's constants that gives one."""

T = TypeVar("T")

_TABLE_BYTES = 1 << 20
_MOST_DOTS = 40
"""Far above any table's."""


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class GridRow(_Row, frozen=True, kw_only=True):
    """Grid size; see schema.GridRule for what the fields do."""

    blocks: Expression = 0
    param: str | None = None
    per: Expression = 1
    max: Expression | None = None
    max_per_sm: Expression | None = None
    co_resident: bool = False
    min_resident: Expression = 1


class KernelRow(_Row, frozen=True, kw_only=True):
    """One launch of an arm; see schema.KernelConfig."""

    block: Expression | tuple[Expression, ...]
    grid: GridRow
    suffix: str = ""
    cluster: Expression = 1
    dynamic_smem_bytes: Expression = 0
    cooperative: bool = False
    dependent: bool = False


class WorkspaceRow(_Row, frozen=True, kw_only=True):
    """Scratch memory of an arm; see schema.Workspace."""

    bytes: Expression = 0
    bytes_per_token: Expression = 0
    zeroed: bool = False


class ArmRow(_Row, frozen=True, kw_only=True):
    """One algorithm: a template, its arguments and how its kernels are launched."""

    name: str
    summary: str
    template: str
    args: tuple[str, ...]
    kernels: tuple[KernelRow, ...]
    workspace: WorkspaceRow = WorkspaceRow()
    constants: dict[str, Expression] = {}
    flags: tuple[str, ...] = ()
    allow_spills: bool = False


class ProgramRow(_Row, frozen=True, kw_only=True):
    """Programs of one arm: all combinations of the listed constants. A range axis that is absent is not fixed."""

    arm: str
    archs: tuple[str, ...]
    only: dict[str, tuple[Constant, ...]] = {}
    fixed: dict[str, tuple[int, ...]] = {}
    """The row's remaining keys: values per range axis."""


class RouteRow(_Row, frozen=True, kw_only=True):
    """Which arm serves what, on the listed architectures. A range axis that is absent is covered whole."""

    archs: tuple[str, ...]
    table: tuple[tuple[int, int, str], ...]
    """First and last value of the first range axis, and the arm."""
    note: str = ""
    only: dict[str, tuple[Constant, ...]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    """The row's remaining keys: [first, last] per range axis."""


class BorrowRow(_Row, frozen=True, kw_only=True):
    """Arms and programs of another operator, with another template and other arguments."""

    operator: str
    instead_of: str
    """Template of the arms that are taken."""
    template: str
    args: tuple[str, ...]


class Table(_Row, frozen=True, kw_only=True):
    """One operator's file."""

    schema: Literal[1]
    operator: str
    abi_version: Positive
    axes: tuple[Axis, ...]
    tags: dict[str, str]
    args: dict[str, str]
    borrow: tuple[BorrowRow, ...] = ()
    arms: tuple[ArmRow, ...] = ()
    programs: tuple[ProgramRow, ...] = ()
    routes: tuple[RouteRow, ...] = ()


class RegistryRow(_Row, frozen=True, kw_only=True):
    """registry.toml: what the registry as a whole is called."""

    version: str
    serial: Positive


class Cells:
    """One file's text, to say where in it a problem lies."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self._text = text

    def error(self, cell: str, problem: str) -> TableError:
        """`cell` is a path such as `programs[3].num_tokens`; the line of its [[programs]] or [tags] header is added."""
        line = self._line_of(cell)
        where = f"{self.path}:{line}" if line else self.path
        return TableError(f"{where}: {cell}: {problem}" if cell else f"{where}: {problem}")

    def _line_of(self, cell: str) -> int | None:
        """The nth header of the cell's outermost table, or the line that assigns its outermost key."""
        outer = re.match(r"([\w-]+)(?:\[(\d+)\])?", cell)
        if outer is None:
            return None
        key = re.escape(outer[1])
        patterns = (rf"^[ \t]*\[\[{key}\]\]", rf"^[ \t]*(?:\[+{key}[\].]|[\"']?{key}[\"']?[ \t]*[.=])")
        for pattern, index in zip(patterns, (int(outer[2] or 0), 0), strict=True):
            found = [match.start() for match in re.finditer(pattern, self._text, re.MULTILINE)]
            if index < len(found):
                return self._text.count("\n", 0, found[index]) + 1
        return None


def load(path: Path, shown_as: str | None = None) -> tuple[Table, Cells]:
    """Read one operator's table. Raises TableError; `shown_as` replaces the path in messages."""
    data, cells = _read(path, shown_as)
    axes = _convert(data.get("axes", []), tuple[Axis, ...], cells, "axes")
    ranges = [axis.keys[0] for axis in axes if axis.keys and not axis.choices]
    _gather(data, "programs", ("arm", "archs", "only"), ranges, "fixed", cells)
    _gather(data, "routes", ("archs", "table", "note", "only"), ranges[1:], "ranges", cells)
    return _convert(data, Table, cells), cells


def lend(table: Table, cells: Cells, others: Mapping[str, Table]) -> Table:
    """The table with the arms and programs that it borrows in front of its own. Raises TableError if there are none."""
    arms: list[ArmRow] = []
    programs: list[ProgramRow] = []
    for index, borrow in enumerate(table.borrow):
        lender = others.get(borrow.operator)
        lent = [arm for arm in lender.arms if arm.template == borrow.instead_of] if lender else []
        if lender is None or not lent:
            cell = f"borrow[{index}].operator"
            raise cells.error(cell, f"expected a table with arms of {borrow.instead_of}, got {borrow.operator!r}")
        names = [arm.name for arm in lent]
        arms += (msgspec.structs.replace(arm, template=borrow.template, args=borrow.args) for arm in lent)
        programs += (row for row in lender.programs if row.arm in names)
    return msgspec.structs.replace(table, arms=(*arms, *table.arms), programs=(*programs, *table.programs))


def load_registry(path: Path, shown_as: str | None = None) -> RegistryRow:
    """Read registry.toml. Raises TableError."""
    data, cells = _read(path, shown_as)
    return _convert(data, RegistryRow, cells)


def load_struct(path: Path, kind: type[T], shown_as: str | None = None) -> T:
    """Read any TOML file into a strict struct. Raises TableError."""
    data, cells = _read(path, shown_as)
    return _convert(data, kind, cells)


def _read(path: Path, shown_as: str | None) -> tuple[dict[str, Any], Cells]:
    name = shown_as or str(path)
    try:
        text = read_bounded(path, _TABLE_BYTES).decode("utf-8")
    except OSError as error:
        raise TableError(f"{name}: expected a readable TOML file, got {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{name}: expected TOML: {error}") from error
    _refuse_long_keys(name, text)
    try:
        return tomllib.loads(text), Cells(name, text)
    except RecursionError:
        raise TableError(f"{name}: expected TOML, got one that is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise TableError(f"{name}: expected TOML: {error}") from error


def _refuse_long_keys(name: str, text: str) -> None:
    """The parser's memory grows with the square of a dotted key's length. Raises TableError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise TableError(f"{name}:{number}: expected at most {_MOST_DOTS} dots in a line, got {line.count('.')}")


def _gather(
    data: dict[str, Any], table: str, known: Sequence[str], axes: Sequence[str], rest: str, cells: Cells
) -> None:
    """Move the keys that are the operator's own (its range axes) into one dictionary under `rest`, in each row."""
    rows = data.get(table, [])
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        if not isinstance(row, dict):
            continue
        own = {key: row.pop(key) for key in list(row) if key not in known}
        for key in own:
            if key not in axes:
                expected = ", ".join([*known, *axes])
                raise cells.error(f"{table}[{index}].{key}", f"unknown key: expected one of {expected}")
        row[rest] = own


def _keys_of(kind: type) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(kind))


def _convert(data: object, kind: type[T], cells: Cells, outer: str = "") -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        cell = (outer + path.rstrip("`")).lstrip(".").replace(".fixed[...]", "").replace(".ranges[...]", "")
        unknown = re.fullmatch(r"Object contains unknown field `(.*)`", problem)
        if unknown and not cell:
            raise cells.error(unknown[1], f"unknown key: expected one of {_keys_of(kind)}") from error
        raise cells.error(cell, problem[:1].lower() + problem[1:]) from error
