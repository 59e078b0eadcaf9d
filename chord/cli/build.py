"""`chord build`: every cubin from its template, and the manifest that names them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chord import _settings
from chord.cli._output import Json, console, errors, print_json
from chord.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chord.build.builder import BuildReport
    from chord.build.jobs import Selection
    from chord.build.make import Progress, Step
    from chord.build.tree import Tree

Arch = Annotated[
    list[str] | None, typer.Option("--arch", help="Only this architecture, for example sm_90a; repeatable.")
]
Op = Annotated[list[str] | None, typer.Option("--op", help="Only this operator, for example fused_router; repeatable.")]
Root = Annotated[
    str | None,
    typer.Option(
        "--root", help="The checkout to build, instead of CHORD_REGISTRY or the one that this chord belongs to."
    ),
]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Compiler processes; default: one a core.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build")(build)


def build(
    arch: Arch = None,
    op: Op = None,
    jobs: Jobs = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Change nothing; list what differs from the manifest, and exit 1 if anything does."
        ),
    ] = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Publish nothing and exit 1 unless manifest.json comes out as it is.")
    ] = False,
    executor: Annotated[
        str | None,
        typer.Option(
            "--executor", help="dask://HOST:PORT: compile on that Dask cluster, whose workers have this chord."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Compile every program for its architectures with the pinned NVRTC and write manifest.json.

    Unchanged programs are not compiled again. A failure publishes nothing.
    """
    settings = _settings.read()
    if root is not None and not root.strip():
        raise SettingsError("--root is empty: expected a checkout's folder; give one, or leave it out")
    selection, tree = as_selection(arch, op), as_tree(settings.registry if root is None else Path(root))
    if executor is not None:
        from chord.build.cluster import scheduler_of

        scheduler_of(executor)  # a mistake is one even where nothing has to be compiled
    _require_pinned(tree, settings, writes=not (check or locked))
    if check and executor:
        raise typer.BadParameter("--executor compiles for a build; --check compiles on this machine")
    if check:
        run_check(selection, jobs, json, tree=tree, fresh=False)
        return
    from chord.build.builder import build as run

    with _one_line_if_interrupted(), progress_bar(json) as progress:
        report = run(selection, tree=tree, jobs=jobs, progress=progress, locked=locked, executor=executor)
    _tell(report, json)
    if report.stale:
        raise typer.Exit(1)


def _tell(report: BuildReport, json: bool) -> None:
    """Print what a build did, and the compiler's warnings on standard error."""
    for (program, where), log in report.warnings.items():
        errors().print(f"{program} for {where}:\n{log}", style="yellow", markup=False, highlight=False)
    if json:
        document = {
            "cubins": report.cubins,
            "compiled": report.compiled,
            "reused": report.reused,
            "removed": report.removed,
            "stale": report.stale,
            "manifest_sha256": report.digest,
            "seconds": round(report.seconds, 3),
        }
        print_json(document)
    else:
        console().print(
            f"{report.cubins} cubins: {report.compiled} compiled, {report.reused} unchanged, "
            f"{len(report.removed)} removed, {report.seconds:.1f} s"
        )
        console().print(_published(report.digest, len(report.stale)), highlight=False, soft_wrap=True)


def as_selection(arch: list[str] | None, op: list[str] | None) -> Selection:
    """The programs that the options name; none given means all."""
    from chord.build.jobs import Selection

    return Selection(architectures=tuple(arch or ()), operators=tuple(op or ()))


def as_tree(root: Path | None) -> Tree | None:
    """The tree in `root`; None stands for the default."""
    from chord.build.tree import Tree

    return None if root is None else Tree(root)


def run_check(
    selection: Selection,
    jobs: int | None,
    json: bool,
    *,
    tree: Tree | None,
    fresh: bool,
    said: dict[str, Any] | None = None,
) -> None:
    """Compare the manifest with its sources; print the differences and exit 1 if there are any.

    fresh: compile everything again instead of trusting cubins that an earlier build finished.
    said: what else the JSON document says.
    """
    from chord.build.check import check

    with _one_line_if_interrupted(), progress_bar(json) as progress:
        report = check(selection, tree=tree, jobs=jobs, progress=progress, fresh=fresh)
    if json:
        rows = [{"program": d.program, "arch": d.arch, "what": d.what} for d in report.differences]
        document = {"cubins": report.cubins, "compiled": report.compiled, "differences": rows}
        print_json((said or {}) | document)
    else:
        for difference in report.differences:
            console().print(str(difference), style="red", markup=False, highlight=False, soft_wrap=True)
        verdict = f"{len(report.differences)} differences" if report.differences else "equal to the manifest"
        console().print(f"{report.cubins} cubins ({report.compiled} compiled now): {verdict}")
    if report.differences:
        raise typer.Exit(1)


def _require_pinned(tree: Tree | None, settings: _settings.Settings, *, writes: bool) -> None:
    """What is pinned must be there already, and a build that may write another manifest contradicts it."""
    from chord.build.tree import Tree
    from chord.registry import canonical
    from chord.registry.demands import Demands

    given = {"CHORD_PIN": settings.pin, "CHORD_LOCK": settings.lock, "CHORD_KEY": settings.key}
    asked = [name for name, value in given.items() if value is not None]
    if not asked:
        return
    if writes:
        raise SettingsError(
            f"{' and '.join(asked)} is set, and `chord build` writes a manifest: unset it, or add --locked or --check"
        )
    tree = tree or Tree.default()
    try:
        data = tree.manifest_bytes()
    except FileNotFoundError:
        raise SettingsError(f"{' and '.join(asked)} is set: expected {tree.manifest}, found no file") from None
    demands = Demands.gather(settings, tree.root, pin=None, lock=None, key=None, relock=False)
    demands.check_bytes(tree.manifest, data, canonical.digest(data))


@contextmanager
def _one_line_if_interrupted() -> Iterator[None]:
    """Control-C ends the command with the status that a shell gives it."""
    try:
        yield
    except KeyboardInterrupt:
        errors().print("interrupted; finished cubins are kept for the next build")
        raise typer.Exit(130) from None


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """A bar on standard error while cubins are made; none if `quiet`, or where standard error is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = errors()
    with Progress(*columns, console=shown, disable=quiet or not shown.is_terminal, transient=True) as bar:
        task = bar.add_task("reading templates", total=None)

        def show(step: Step) -> None:
            if step.outcome == "waiting" and not quiet and not shown.is_terminal:
                shown.print("waiting for another build of this tree")
            elif step.outcome == "waiting":
                bar.update(task, description="waiting for another build of this tree")
            else:
                text = f"{step.outcome} {step.program} for {step.arch}"
                bar.update(task, completed=step.done, total=step.total, description=text)

        yield show


def _published(digest: str | None, stale: int) -> str:
    if digest is not None:
        return f"manifest {digest}"
    return f"manifest not written: {stale} cubins outside the selection are out of date; run `chord build` without one"
