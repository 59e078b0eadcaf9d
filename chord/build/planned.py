"""What a table says once it is worked out: programs before they are compiled, and the operator that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from chord.build.tables import ArmRow, Cells
from chord.registry.names import ProgramName
from chord.registry.schema import Arg, Arm, Axis, Constant, KernelConfig, Route, Workspace


@dataclass(frozen=True)
class PlannedProgram:
    """One program before it is compiled."""

    name: ProgramName
    arm: ArmRow
    arm_cell: str
    """Where the arm stands in its table: arms[2]."""
    args: tuple[Arg, ...]
    constants: dict[str, Constant]
    """Axis constants in the order of the axes, then the arm's own."""
    axis_constants: dict[str, Constant]
    kernels: tuple[KernelConfig, ...]
    workspace: Workspace
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class OperatorPlan:
    """One operator before its programs are compiled."""

    name: str
    abi_version: int
    axes: tuple[Axis, ...]
    arms: dict[str, Arm]
    programs: dict[str, PlannedProgram]
    routes: dict[str, tuple[Route, ...]]
    notes: dict[str, str]
    cells: Cells
