"""From an operator's table to its programs and routes: names, constants, launch rules, limits. No compiler runs.

Every error is a TableError that names the file, the line or the cell.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from chord.build import options
from chord.build.planned import OperatorPlan, PlannedProgram
from chord.build.render import Renderer
from chord.build.routes import narrowed, plan_routes
from chord.build.tables import ArmRow, Cells, Expression, GridRow, KernelRow, ProgramRow, Table
from chord.build.toolchain import ToolchainPin
from chord.errors import TableError
from chord.registry.boxes import Domain, check_axes
from chord.registry.consistency import ELEMENT_TYPES, PARAMETER_TYPES
from chord.registry.names import ProgramName
from chord.registry.schema import Arg, Arm, Axis, Constant, GridRule, KernelConfig, Workspace

MAX_THREADS = 1024
"""Threads of a block."""
MAX_CLUSTER = 16
"""CTAs of a cluster, non-portable sizes included."""

_ARG_TYPES = {"buffer": ELEMENT_TYPES, "parameter": PARAMETER_TYPES}


def plan_operator(table: Table, cells: Cells, renderer: Renderer, pin: ToolchainPin) -> OperatorPlan:
    """Work out everything that a table says. Raises TableError."""
    planner = _Planner(table, cells, renderer, pin)
    arms = planner.arms()
    programs = planner.programs()
    routes, notes = plan_routes(table, cells, planner.domain, programs, pin)
    return OperatorPlan(table.operator, table.abi_version, table.axes, arms, programs, routes, notes, cells)


_MOST_PROGRAMS = 4096
"""Of one row: far above what a full build has time for."""


class _Planner:
    def __init__(self, table: Table, cells: Cells, renderer: Renderer, pin: ToolchainPin) -> None:
        self._table = table
        self._cells = cells
        self._renderer = renderer
        self._pin = pin
        problems = check_axes(table.axes)
        if problems:
            raise cells.error("axes", problems[0])
        self.domain = Domain.of(table.axes)
        self._axis_keys = [key for axis in table.axes for key in axis.keys]
        self._args = self._parse_args()
        self._check_tags()

    def _parse_args(self) -> dict[str, Arg]:
        args = {}
        for name, text in self._table.args.items():
            kind, _, type_ = text.partition(" ")
            if type_ not in _ARG_TYPES.get(kind, ()):
                known = "; ".join(f"{kind} {'|'.join(types)}" for kind, types in _ARG_TYPES.items())
                raise self._cells.error(f"args.{name}", f"expected one of {known}, got {text!r}")
            args[name] = Arg(kind=kind, name=name, type=type_)  # type: ignore[arg-type]
        return args

    def _check_tags(self) -> None:
        tags = self._table.tags
        for axis in self._table.axes:
            for position, key in enumerate(axis.keys):
                self._check_axis_tag(axis, position, key)
        for key, tag in tags.items():
            if key not in self._axis_keys:
                raise self._cells.error(f"tags.{key}", f"expected an axis key: {', '.join(self._axis_keys)}")
            if not re.fullmatch("[a-z]+", tag) or list(tags.values()).count(tag) > 1:
                raise self._cells.error(
                    f"tags.{key}", f"expected lower-case letters that no other tag has, got {tag!r}"
                )

    def _check_axis_tag(self, axis: Axis, position: int, key: str) -> None:
        values = [row[position] for row in axis.choices]
        for value in values:
            if isinstance(value, str) and not re.fullmatch("[a-z]+(0|[1-9][0-9]*)", value):
                raise self._cells.error("axes", f"{key} = {value!r}: a word in a name is letters and then a number")
        if (not values or any(isinstance(value, int) for value in values)) and key not in self._table.tags:
            raise self._cells.error("tags", f"expected a tag for {key}")

    def arms(self) -> dict[str, Arm]:
        """Check the arms and turn them into the manifest's."""
        arms: dict[str, Arm] = {}
        for index, row in enumerate(self._table.arms):
            cell = f"arms[{index}]"
            problem = self._arm_problem(row, arms)
            if problem:
                raise self._cells.error(cell, f"{row.name}: {problem}")
            arms[row.name] = Arm(
                template=row.template, args=tuple(self._args[name] for name in row.args), summary=row.summary
            )
        return arms

    def _arm_problem(self, row: ArmRow, before: Mapping[str, Arm]) -> str | None:
        if row.name in before:
            return "declared twice"
        unknown = [name for name in row.args if name not in self._args]
        if unknown or len(set(row.args)) != len(row.args):
            return f"args: expected names from [args], each once; unknown: {', '.join(unknown) or 'none'}"
        if posixpath.normpath(row.template) != row.template or row.template.startswith(("/", "..")):
            return f"template: expected a plain path under templates/, got {row.template!r}"
        suffixes = [kernel.suffix for kernel in row.kernels]
        if not suffixes or suffixes[0] != "" or len(set(suffixes)) != len(suffixes):
            return 'kernels: expected one or more, the first with suffix "", the others each with their own'
        if not all(re.fullmatch("[a-z0-9_]*", suffix) for suffix in suffixes):
            return "kernels: a suffix is lower-case letters, digits and underscores"
        refused = options.refused(row.flags)
        if refused:
            return f"flags: refused {', '.join(refused)}; allowed are {', '.join(options.ALLOWED)}"
        clash = set(row.constants).intersection([*self._axis_keys, "symbol"])
        return f"constants: {', '.join(sorted(clash))} is the axes' own" if clash else None

    def programs(self) -> dict[str, PlannedProgram]:
        """All programs by name, in the table's order."""
        programs: dict[str, PlannedProgram] = {}
        for index, row in enumerate(self._table.programs):
            cell = f"programs[{index}]"
            arm = self._arm_of(row, cell)
            self._check_program_row(row, cell)
            for constants in self._combinations(row, cell):
                program = self._program(row, arm, constants, cell)
                if str(program.name) in programs:
                    raise self._cells.error(cell, f"{program.name} is declared twice")
                programs[str(program.name)] = program
        return programs

    def _arm_of(self, row: ProgramRow, cell: str) -> tuple[int, ArmRow]:
        for index, arm in enumerate(self._table.arms):
            if arm.name == row.arm:
                return index, arm
        names = ", ".join(arm.name for arm in self._table.arms)
        raise self._cells.error(f"{cell}.arm", f"{row.arm!r} is not an arm of this table: {names}")

    def _check_program_row(self, row: ProgramRow, cell: str) -> None:
        self._check_archs(row.archs, cell)
        ranges = {axis.keys[0]: axis for axis in self.domain.ranges}
        for key, values in row.fixed.items():
            axis = ranges[key]
            for position, value in enumerate(values):
                if not axis.first <= value <= axis.last or (value - axis.first) % axis.step:
                    raise self._cells.error(
                        f"{cell}.{key}[{position}]",
                        f"expected {axis.first}..{axis.last} in steps of {axis.step}, got {value}",
                    )
            if not values:
                raise self._cells.error(f"{cell}.{key}", "expected at least one value; leave the key out to serve any")

    def _check_archs(self, archs: tuple[str, ...], cell: str) -> None:
        known = ", ".join(self._pin.architectures)
        for position, arch in enumerate(archs):
            if arch not in self._pin.architectures:
                raise self._cells.error(f"{cell}.archs[{position}]", f"expected one of {known}, got {arch!r}")
        if not archs or len(set(archs)) != len(archs):
            raise self._cells.error(f"{cell}.archs", f"expected one or more of {known}, each once")

    def _combinations(self, row: ProgramRow, cell: str) -> Iterator[dict[str, Constant]]:
        """The axis constants of each program of a row, in the order of the axes."""
        fixed = list(row.fixed.items())
        narrow = narrowed(self.domain, row.only, self._cells, cell)
        count = len(narrow) * prod(len(values) for _, values in fixed)
        if count > _MOST_PROGRAMS:
            raise self._cells.error(cell, f"expected at most {_MOST_PROGRAMS} programs of a row, got {count}")
        for combination in narrow:
            for values in product(*(choices for _, choices in fixed)):
                given = dict(zip(self.domain.choice_keys, combination, strict=True))
                given.update(zip((key for key, _ in fixed), values, strict=True))
                yield {key: given[key] for key in self._axis_keys if key in given}

    def _program(
        self, row: ProgramRow, arm: tuple[int, ArmRow], axis_constants: dict[str, Constant], cell: str
    ) -> PlannedProgram:
        index, arm_row = arm
        try:
            name = ProgramName(self._table.operator, arm_row.name, tuple(self._tokens(axis_constants)))
        except ValueError as error:
            raise self._cells.error(cell, str(error)) from error
        evaluate = _Evaluator(self._renderer, self._cells, f"arms[{index}]", name, dict(axis_constants))
        for key, expression in arm_row.constants.items():
            evaluate.constants[key] = evaluate.constant(f"constants.{key}", expression)
        workspace = Workspace(
            bytes=evaluate.number("workspace.bytes", arm_row.workspace.bytes),
            bytes_per_token=evaluate.number("workspace.bytes_per_token", arm_row.workspace.bytes_per_token),
            zeroed=arm_row.workspace.zeroed,
        )
        kernels = tuple(
            self._kernel(evaluate, kernel, f"kernels[{position}]", name, arm_row, row.archs)
            for position, kernel in enumerate(arm_row.kernels)
        )
        return PlannedProgram(
            name=name,
            arm=arm_row,
            arm_cell=evaluate.arm_cell,
            args=tuple(self._args[arg] for arg in arm_row.args),
            constants=evaluate.constants,
            axis_constants=axis_constants,
            kernels=kernels,
            workspace=workspace,
            architectures=row.archs,
        )

    def _tokens(self, axis_constants: Mapping[str, Constant]) -> Iterator[tuple[str, int]]:
        for key, value in axis_constants.items():
            if isinstance(value, int):
                yield self._table.tags[key], value
            else:
                word = value.rstrip("0123456789")
                yield word, int(value[len(word) :])

    def _kernel(
        self, evaluate: _Evaluator, row: KernelRow, cell: str, name: ProgramName, arm: ArmRow, archs: tuple[str, ...]
    ) -> KernelConfig:
        sizes = row.block if isinstance(row.block, tuple) else (row.block,)
        x, y, z, *more = [*(evaluate.number(f"{cell}.block", size, least=1) for size in sizes), 1, 1, 1]
        if len(sizes) > 3 or x * y * z > MAX_THREADS:
            got = " x ".join(str(size) for size in (x, y, z, *more)[: len(sizes)])
            raise evaluate.error(f"{cell}.block", f"expected at most {MAX_THREADS} threads in 1 to 3 sizes, got {got}")
        cluster = evaluate.number(f"{cell}.cluster", row.cluster, least=1, most=MAX_CLUSTER)
        most = min(self._pin.architectures[arch].max_shared_bytes for arch in archs)
        return KernelConfig(
            symbol=f"{name.symbol}_{row.suffix}" if row.suffix else name.symbol,
            block=(x, y, z),
            cluster=cluster,
            dynamic_smem_bytes=evaluate.number(f"{cell}.dynamic_smem_bytes", row.dynamic_smem_bytes, most=most),
            grid=self._grid(evaluate, row.grid, f"{cell}.grid", arm, cluster),
            cooperative=row.cooperative,
            dependent=row.dependent,
        )

    def _grid(self, evaluate: _Evaluator, row: GridRow, cell: str, arm: ArmRow, cluster: int) -> GridRule:
        blocks = evaluate.number(f"{cell}.blocks", row.blocks)
        if (row.param is None) == (blocks == 0):
            raise evaluate.error(cell, "expected either blocks (at least 1) or param")
        if row.param is not None and (row.param not in arm.args or self._args[row.param].type not in ("i32", "i64")):
            raise evaluate.error(f"{cell}.param", f"expected an integer parameter of the arm, got {row.param!r}")
        if blocks % cluster:
            raise evaluate.error(f"{cell}.blocks", f"expected whole clusters of {cluster}, got {blocks} blocks")
        return GridRule(
            blocks=blocks,
            param=row.param,
            per=evaluate.number(f"{cell}.per", row.per, least=1),
            max=None if row.max is None else evaluate.number(f"{cell}.max", row.max, least=1),
            max_per_sm=None
            if row.max_per_sm is None
            else evaluate.number(f"{cell}.max_per_sm", row.max_per_sm, least=1),
            co_resident=row.co_resident,
            min_resident=evaluate.number(f"{cell}.min_resident", row.min_resident, least=1),
        )


@dataclass
class _Evaluator:
    """Values of one program's expressions; its errors name the arm's cell and the program."""

    renderer: Renderer
    cells: Cells
    arm_cell: str
    name: ProgramName
    constants: dict[str, Constant]

    def error(self, cell: str, problem: str) -> TableError:
        return self.cells.error(f"{self.arm_cell}.{cell}", f"{self.name}: {problem}")

    def constant(self, cell: str, expression: Expression) -> Constant:
        try:
            return self.renderer.evaluate(expression, self.constants)
        except ValueError as error:
            raise self.error(cell, str(error)) from error

    def number(self, cell: str, expression: Expression, least: int = 0, most: int | None = None) -> int:
        value = self.constant(cell, expression)
        if not isinstance(value, int) or value < least or (most is not None and value > most):
            expected = f"at least {least}" if most is None else f"{least}..{most}"
            raise self.error(cell, f"expected a whole number, {expected}, got {value!r} from {expression!r}")
        return value
