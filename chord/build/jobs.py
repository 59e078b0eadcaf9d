"""What there is to compile: every program on every architecture, each with its closure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chord._version import __version__, same_version
from chord.build import closure, options, tables, toolchain
from chord.build.closure import Closure, Headers
from chord.build.nvrtc import Request
from chord.build.plan import plan_operator
from chord.build.planned import OperatorPlan, PlannedProgram
from chord.build.render import SOURCE_ENDINGS, Renderer
from chord.build.tables import Cells, RegistryRow, Table
from chord.build.toolchain import ToolchainPin
from chord.build.tree import Tree
from chord.errors import ChordError, CompileError, TableError

Key = tuple[str, str]
"""Program name and architecture."""


@dataclass(frozen=True)
class Selection:
    """Which programs a command is about; empty means all."""

    architectures: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    def has(self, job: Job) -> bool:
        """Whether the job is meant."""
        return (not self.architectures or job.arch in self.architectures) and (
            not self.operators or job.program.name.operator in self.operators
        )

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return not self.architectures and not self.operators


@dataclass(frozen=True)
class Job:
    """One cubin to be made. Exactly one of `closure` and `problem` is set."""

    program: PlannedProgram
    arch: str
    cells: Cells
    max_shared_bytes: int
    min_driver: int
    source: str = ""
    """Rendered; empty when rendering failed."""
    closure: Closure | None = None
    problem: str = ""
    """Why there is no closure: the template cannot be rendered, or reads what it must not."""

    @property
    def key(self) -> Key:
        """Name and architecture."""
        return str(self.program.name), self.arch

    @property
    def request(self) -> Request:
        """What the compiler is given. Raises CompileError for a job without a closure."""
        made = self.require_closure()
        return Request(name=made.name, source=made.source, headers=made.headers, options=made.options)

    def require_closure(self) -> Closure:
        """The closure; CompileError when there is none."""
        if self.closure is None:
            raise CompileError(self.problem)
        return self.closure


@dataclass(frozen=True)
class Work:
    """Everything that the sources say, before anything is compiled."""

    registry: RegistryRow
    pin: ToolchainPin
    operators: tuple[OperatorPlan, ...]
    sources: dict[str, str]
    """SHA-256 of every template and header, by path under templates/."""
    jobs: tuple[Job, ...]
    """In the order of operators, programs and architectures."""

    def selected(self, selection: Selection) -> list[Job]:
        """The selected jobs. Raises ChordError for a name that does not exist."""
        for arch in selection.architectures:
            self.pin.require_architecture(arch)
        known = [plan.name for plan in self.operators]
        for name in selection.operators:
            if name not in known:
                raise ChordError(f"operator {name!r} is not known: expected one of {', '.join(known) or 'none'}")
        return [job for job in self.jobs if selection.has(job)]


def read(tree: Tree) -> Work:
    """Read tables and templates, plan, render and hash. Raises TableError; a bad template is its jobs' problem."""
    pin = toolchain.load(tree.toolchain, "build/toolchain.toml")
    _check_options(pin)
    registry = tables.load_registry(tree.registry / "registry.toml", "registry/registry.toml")
    if not same_version(registry.version, __version__):
        raise TableError(
            f"registry/registry.toml: version: expected {__version__}, this chord's (chord/_version.py), got "
            f"{registry.version}: no chord but that one could open the manifest"
        )
    renderer, headers = Renderer(tree.templates), Headers(tree.include)
    plans = [plan_operator(table, cells, renderer, pin) for table, cells in _read_tables(tree)]
    jobs = tuple(job for plan in plans for job in _jobs_of(plan, renderer, headers, pin))
    return Work(registry, pin, tuple(plans), _hash_sources(tree), jobs)


def _read_tables(tree: Tree) -> list[tuple[Table, Cells]]:
    """The operators' tables, by name."""
    found = {}
    for path in sorted(tree.registry.glob("*.toml")):
        if path.name != "registry.toml":
            table, cells = tables.load(path, f"registry/{path.name}")
            if table.operator != path.stem:
                raise cells.error("operator", f"expected {path.stem!r}, the file's name, got {table.operator!r}")
            found[table.operator] = table, cells
    every = {operator: table for operator, (table, _) in found.items()}
    return [(tables.lend(table, cells, every), cells) for table, cells in found.values()]


def _check_options(pin: ToolchainPin) -> None:
    for arch in pin.architectures:
        given = pin.options(arch)
        refused = options.refused(given)
        missing = {f"--gpu-architecture={arch}", *options.REQUIRED}.difference(given)
        if refused or missing:
            raise TableError(
                f"build/toolchain.toml: architectures.{arch}: options refused: {', '.join(refused) or 'none'}; "
                f"missing: {', '.join(sorted(missing)) or 'none'}"
            )


def _jobs_of(plan: OperatorPlan, renderer: Renderer, headers: Headers, pin: ToolchainPin) -> Iterable[Job]:
    for program in plan.programs.values():
        file, source, needed, problem = f"{program.name}.cu", "", {}, ""
        try:
            source = renderer.render(program.arm.template, program.constants, program.name.symbol)
            needed = headers.needed_by(source, file)
        except (TableError, CompileError) as error:
            problem = str(error)
        for arch in program.architectures:
            pinned = pin.architectures[arch]
            made = Closure(file, source, needed, pin.options(arch) + program.arm.flags, pin.identity)
            yield Job(
                program=program,
                arch=arch,
                cells=plan.cells,
                max_shared_bytes=pinned.max_shared_bytes,
                min_driver=pinned.min_driver,
                source=source,
                closure=None if problem else made,
                problem=problem,
            )


def _hash_sources(tree: Tree) -> dict[str, str]:
    return {
        path.relative_to(tree.templates).as_posix(): closure.sha256_text(closure.read_source(path))
        for path in tree.templates.rglob("*")
        if path.is_file() and path.name.endswith(SOURCE_ENDINGS)
    }
