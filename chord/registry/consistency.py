"""What a manifest says twice must agree: names, arms, builds, routes. Types alone cannot say that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from chord.registry.architectures import KNOWN
from chord.registry.boxes import check_cover
from chord.registry.names import ProgramName
from chord.registry.schema import Arm, KernelConfig, Manifest, Operator, Program, Route

PARAMETER_TYPES = ("i32", "i64", "f32")
"""C scalars that a kernel parameter may have."""

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
_PATH_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NO_PATH = "expected names of letters, digits, _ . and - below templates/"

ELEMENT_TYPES = ("any", "bf16", "f16", "f32", "i32", "i64", "u8")
"""What a buffer may hold."""


def problems_of(manifest: Manifest) -> list[str]:
    """Every contradiction, each naming its entry; empty for a good manifest."""
    problems = [f"sources: {path!r}: {_NO_PATH}" for path in manifest.sources if not _inside(path)]
    for name, operator in manifest.operators.items():
        problems.extend(f"{name}: {problem}" for problem in _operator_problems(manifest, name, operator))
    return problems


def _operator_problems(manifest: Manifest, name: str, operator: Operator) -> Iterator[str]:
    for arm_name, arm in operator.arms.items():
        yield from (f"arm {arm_name}: {problem}" for problem in _arm_problems(arm))
    for program_name, program in operator.programs.items():
        yield from (f"{program_name}: {problem}" for problem in _name_problems(name, program_name, program))
        yield from (f"{program_name}: {problem}" for problem in _program_problems(manifest, operator, program))
    covered: list[Sequence[Route]] = []
    for arch, routes in operator.routes.items():
        if arch not in KNOWN:
            yield f"routes for architecture {arch!r}: expected one of {', '.join(KNOWN)}"
        for route in routes:
            place = f"{arch}: route of {route.program}"
            yield from (f"{place}: {problem}" for problem in _route_problems(operator, arch, route))
        if routes not in covered:  # often the same for several architectures
            problems = check_cover(operator.axes, routes)
            yield from (f"{arch}: {problem}" for problem in problems)
            covered += [] if problems else [routes]


def _inside(path: str) -> bool:
    """Whether a path is plain words below the folder that it is relative to."""
    return all(_PATH_PART.fullmatch(part) for part in path.split("/"))


def _arm_problems(arm: Arm) -> Iterator[str]:
    if not _inside(arm.template):
        yield f"template {arm.template!r}: {_NO_PATH}"
    names = [arg.name for arg in arm.args]
    if len(set(names)) != len(names):
        yield "an argument is listed twice"
    for arg in arm.args:
        types = {"parameter": PARAMETER_TYPES, "buffer": ELEMENT_TYPES}.get(arg.kind)
        if types is None:
            yield f"argument {arg.name}: this version launches buffers and parameters, not {arg.kind}"
        elif arg.type not in types:
            yield f"argument {arg.name}: {arg.kind} type {arg.type!r}, expected one of {', '.join(types)}"


def _name_problems(operator_name: str, name: str, program: Program) -> Iterator[str]:
    try:
        parsed = ProgramName.parse(name)
    except ValueError as error:
        yield str(error)
        return
    if parsed.operator != operator_name:
        yield f"names operator {parsed.operator}, stands under {operator_name}"
    if parsed.arm != program.arm:
        yield f"names arm {parsed.arm}, has arm {program.arm}"
    spelled = {str(value) for value in program.constants.values()}
    for tag, value in parsed.tokens:
        if str(value) not in spelled and f"{tag}{value}" not in spelled:
            yield f"names constant {tag}{value}, which is not among its constants"


def _program_problems(manifest: Manifest, operator: Operator, program: Program) -> Iterator[str]:
    arm = operator.arms.get(program.arm)
    if arm is None:
        yield f"arm {program.arm} does not exist; there are {', '.join(sorted(operator.arms))}"
        return
    for key, fixed in (("num_tokens", program.num_tokens), ("block_m", program.block_m)):
        if program.constants.get(key) != fixed:
            yield f"{key} is {fixed}, its constants say {program.constants.get(key)}"
    if set(program.builds) != set(program.architectures):
        yield f"declared for {', '.join(program.architectures)}, built for {', '.join(sorted(program.builds))}"
    for arch in program.architectures:
        if arch not in KNOWN or arch not in manifest.toolchain.options:
            yield f"architecture {arch!r}: expected one of {', '.join(KNOWN)}, with options in the toolchain"
    for arch, build in program.builds.items():
        if len(build.kernels) != len(program.kernels):
            yield f"{arch}: resources of {len(build.kernels)} kernels, expected {len(program.kernels)}"
    symbols = [kernel.symbol for kernel in program.kernels]
    if not symbols or len(set(symbols)) != len(symbols):
        yield "expected one or more kernels, each with its own symbol"
    for kernel in program.kernels:
        yield from (f"{kernel.symbol!r}: {problem}" for problem in _kernel_problems(arm, kernel))


def _kernel_problems(arm: Arm, kernel: KernelConfig) -> Iterator[str]:
    if not _SYMBOL.fullmatch(kernel.symbol):
        yield "expected a C identifier"
    grid = kernel.grid
    if (grid.param is None) == (grid.blocks == 0):
        yield "its grid needs either a number of blocks or a parameter"
    parameters = [arg.name for arg in arm.args if arg.kind == "parameter" and arg.type in ("i32", "i64")]
    if grid.param is not None and grid.param not in parameters:
        yield f"its grid follows {grid.param}, which is not an integer parameter of the arm ({', '.join(parameters)})"
    if grid.blocks % kernel.cluster:
        yield f"{grid.blocks} blocks are no whole number of clusters of {kernel.cluster}"


def _route_problems(operator: Operator, arch: str, route: Route) -> Iterator[str]:
    program = operator.programs.get(route.program)
    if program is None:
        yield "there is no such program"
        return
    if arch not in program.architectures:
        yield f"the program is declared for {', '.join(program.architectures)}"
    for key, side in route.where.items():
        limit = program.limit(key)
        if limit is not None and isinstance(side, tuple) and side[1] > limit:
            yield f"covers {key} {side}, the program serves at most {limit}"
        fixed = program.constants.get(key)
        if fixed is None:
            continue
        wanted = (fixed, fixed) if isinstance(side, tuple) else fixed
        if side != wanted:
            yield f"covers {key} {side}, the program is made for {fixed}"
