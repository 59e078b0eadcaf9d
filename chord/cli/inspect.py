"""`chord ls | show | lookup | coverage`: what exists, and what would run. None of them needs a GPU, torch or NVRTC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from chord.cli._output import Json, RegistryPath, console, open_registry, print_json, print_table
from chord.errors import NoProgramError
from chord.registry import Registry
from chord.registry.architectures import ordered
from chord.registry.receipts import Receipts
from chord.registry.schema import Operator, Program, Route

_MOST_DIGITS = 100
"""Characters of a value in a problem: far above any."""

Arch = Annotated[str | None, typer.Option("--arch", help="Only this architecture, for example sm_90a.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("ls")(ls)
    app.command("show")(show)
    app.command("lookup")(lookup)
    app.command("coverage")(coverage)


def ls(
    operator: Annotated[str | None, typer.Argument(help="Only this operator.")] = None,
    arch: Arch = None,
    registry: RegistryPath = None,
    json: Json = False,
) -> None:
    """List programs: their architectures, sizes and registers, and the GPUs that their cubins have run on."""
    opened = open_registry(registry)
    programs = opened.programs(operator, arch)
    if json:
        print_json({name: _listing(program, opened.receipts) for name, program in programs.items()})
        return
    rows = (
        (
            name,
            " ".join(ordered(program.builds)),
            _most(build.size_bytes for build in program.builds.values()),
            _most(kernel.registers for build in program.builds.values() for kernel in build.kernels),
            _ran(program, opened.receipts, arch),
        )
        for name, program in programs.items()
    )
    columns = ("program", "architectures", "bytes, at most", "registers, at most", "ran on")
    print_table(f"{len(programs)} programs", columns, rows)
    console().print(_origin(opened), highlight=False, soft_wrap=True)


def show(
    program: Annotated[str, typer.Argument(help="A program's name, as `chord ls` prints it.")],
    registry: RegistryPath = None,
    json: Json = False,
) -> None:
    """Show everything that the manifest says of one program."""
    opened = open_registry(registry)
    operator = program.partition(".")[0]
    found = opened.programs(operator).get(program)
    if found is None:
        raise NoProgramError(f"{program}: no such program of {operator}; `chord ls {operator}` lists those that exist")
    definition = opened.manifest.operators[operator]
    if json:
        ran = {arch: opened.receipts.ran_on(build.cubin_sha256) for arch, build in found.builds.items()}
        print_json({"name": program, "program": found, "arm": definition.arms[found.arm], "ran_on": ran})
        return
    _show_program(program, found, definition, opened.receipts)


def lookup(
    operator: Annotated[str, typer.Argument(help="The operator, for example fused_router.")],
    problem: Annotated[list[str], typer.Argument(help="A value for each of its keys, as key=value.")],
    arch: Annotated[str, typer.Option("--arch", help="The architecture, for example sm_90a.")],
    registry: RegistryPath = None,
    json: Json = False,
) -> None:
    """Say which program serves a problem."""
    opened = open_registry(registry)
    found = opened.lookup(operator, arch, _pairs_of(problem))
    build = found.build
    if json:
        print_json({"program": found.program_name, "arch": arch, "cubin_sha256": build.cubin_sha256})
    else:
        console().print(found.program_name, highlight=False)
        console().print(f"  arm    {found.program.arm}: {found.arm.summary}", highlight=False, soft_wrap=True)
        console().print(f"  cubin  {build.cubin_sha256}, {build.size_bytes} bytes", highlight=False, soft_wrap=True)


def coverage(
    operator: Annotated[str | None, typer.Argument(help="Only this operator.")] = None,
    arch: Arch = None,
    registry: RegistryPath = None,
    json: Json = False,
) -> None:
    """Show which ranges of a problem run which program, and where its cubin has run, per operator and architecture."""
    opened = open_registry(registry)
    names = list(opened.manifest.operators) if operator is None else [operator]
    wanted = [(name, where) for name in names for where in _architectures(opened, name, arch)]
    if json:
        print_json({name: {a: _coverage(opened, name, a) for n, a in wanted if n == name} for name in names})
        return
    for name, where in wanted:
        routes = opened.coverage(name, where)
        keys = tuple(key for axis in opened.manifest.operators[name].axes for key in axis.keys)
        note = opened.manifest.operators[name].notes.get(where, "")
        rows = _coverage_rows(opened, name, where, routes, keys)
        print_table(f"{name} on {where}: {note}", (*keys, "program", "ran on"), rows)


def _listing(program: Program, receipts: Receipts) -> dict[str, Any]:
    return {
        "arm": program.arm,
        "num_tokens": program.num_tokens,
        "block_m": program.block_m,
        "builds": {arch: build.cubin_sha256 for arch, build in program.builds.items()},
        "ran_on": {arch: receipts.ran_on(build.cubin_sha256) for arch, build in program.builds.items()},
    }


def _ran(program: Program, receipts: Receipts, arch: str | None) -> str:
    """Where the program's cubins have run, a line each: of one architecture, or of all."""
    builds = {name: build for name, build in program.builds.items() if arch in (None, name)}
    found = {name: receipts.ran_on(builds[name].cubin_sha256) for name in ordered(builds)}
    return "\n".join(f"{name}: {', '.join(gpus)}" for name, gpus in found.items() if gpus) or "never run"


def _most(values: Iterator[int]) -> int:
    return max(values, default=0)


def _origin(opened: Registry) -> str:
    info = opened.manifest.registry
    where = f"in {opened.root} (from {opened.source})"
    return f"registry {info.version}, serial {info.serial}, {where}, manifest {opened.digest}"


def _show_program(name: str, program: Program, definition: Operator, receipts: Receipts) -> None:
    arm = definition.arms[program.arm]
    facts = [
        ("arm", f"{program.arm}: {arm.summary}"),
        ("template", arm.template),
        ("constants", _pairs(program.constants)),
        ("options", " ".join(program.flags) or "none beyond the toolchain's"),
        ("arguments", ", ".join(f"{arg.name} ({arg.kind} {arg.type})" for arg in arm.args)),
        ("workspace", f"{program.workspace.bytes} bytes + {program.workspace.bytes_per_token} a token"),
    ]
    print_table(name, ("", ""), facts)
    kernels = (
        (k.symbol, "x".join(map(str, k.block)), k.cluster, k.dynamic_smem_bytes, _yes(k.cooperative), _yes(k.dependent))
        for k in program.kernels
    )
    print_table("kernels", ("symbol", "block", "cluster", "dynamic smem bytes", "cooperative", "dependent"), kernels)
    builds = (
        (
            arch,
            program.builds[arch].cubin_sha256,
            program.builds[arch].size_bytes,
            " ".join(str(k.registers) for k in program.builds[arch].kernels),
            " ".join(str(k.spill_bytes) for k in program.builds[arch].kernels),
            ", ".join(receipts.ran_on(program.builds[arch].cubin_sha256)) or "never run",
        )
        for arch in ordered(program.builds)
    )
    print_table("cubins", ("architecture", "SHA-256", "bytes", "registers", "spill bytes", "ran on"), builds)


def _coverage(opened: Registry, operator: str, arch: str) -> list[dict[str, Any]]:
    programs = opened.programs(operator)
    return [
        {
            "where": route.where,
            "program": route.program,
            "ran_on": opened.receipts.ran_on(programs[route.program].builds[arch].cubin_sha256),
        }
        for route in opened.coverage(operator, arch)
    ]


def _coverage_rows(
    opened: Registry, operator: str, arch: str, routes: tuple[Route, ...], keys: tuple[str, ...]
) -> Iterator[tuple[object, ...]]:
    programs = opened.programs(operator)
    for route in routes:
        ran = opened.receipts.ran_on(programs[route.program].builds[arch].cubin_sha256)
        yield (*(_side(route.where[key]) for key in keys), route.program, ", ".join(ran) or "never run")


def _side(value: object) -> object:
    if isinstance(value, tuple):
        return value[0] if value[0] == value[1] else f"{value[0]}..{value[1]}"
    return value


def _architectures(opened: Registry, operator: str, arch: str | None) -> list[str]:
    if arch is not None:
        opened.coverage(operator, arch)  # raises for an unknown one
        return [arch]
    if operator not in opened.manifest.operators:
        opened.programs(operator)  # raises, naming those that exist
    return ordered(opened.manifest.operators[operator].routes)


def _pair(text: str) -> tuple[str, int | str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise typer.BadParameter(f"{text!r}: expected key=value, for example num_tokens=20")
    number = value.removeprefix("-")
    if len(number) > _MOST_DIGITS:
        raise typer.BadParameter(f"{key}: expected a value of at most {_MOST_DIGITS} characters, got {len(number)}")
    return key, int(value) if number.isascii() and number.isdecimal() else value


def _pairs_of(texts: list[str]) -> dict[str, int | str]:
    values: dict[str, int | str] = {}
    for key, value in map(_pair, texts):
        if key in values:
            raise typer.BadParameter(f"{key} is given twice: {values[key]} and {value}")
        values[key] = value
    return values


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "none"


def _yes(flag: bool) -> str:
    return "yes" if flag else ""
