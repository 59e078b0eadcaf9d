"""`chord build`: everything from sources to a published manifest, or nothing published at all.

Steps: (1) read tables and templates, (2) make the cubins, (3) add them to the store, (4) replace the manifest,
(5) remove what it does not name. A failure in (1) or (2) leaves manifest and store as they were, and whatever was
finished is kept for the next build. Killed at any moment, a build leaves nothing that another one would trip over.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace

from chord.build import jobs as jobs_module
from chord.build.assemble import assemble
from chord.build.finished import Finished
from chord.build.inspect import describe
from chord.build.jobs import Key, Selection, Work
from chord.build.lock import exclusive
from chord.build.make import Failure, Made, Maker, Progress, Step
from chord.build.pool import default_jobs
from chord.build.tree import Tree
from chord.errors import CompileError, ManifestError, TableError, VerificationError
from chord.registry import canonical
from chord.registry.files import write_atomically
from chord.registry.schema import Build, Manifest
from chord.registry.store import Store

_SHOWN = 10
"""Failures whose logs one message shows: a mistake in a header would repeat the same log for every program."""


class BuildFailedError(CompileError):
    """Cubins that could not be made; nothing was published. `failures` has each with its log."""

    def __init__(self, failures: tuple[Failure, ...]) -> None:
        self.failures = failures
        listed = [str(failure) for failure in failures[:_SHOWN]] + [failure.headline for failure in failures[_SHOWN:]]
        count = "1 cubin" if len(failures) == 1 else f"{len(failures)} cubins"
        super().__init__("\n".join([f"{count} could not be built:", *listed]))


@dataclass(frozen=True)
class BuildReport:
    """What a build did."""

    cubins: int
    """Cubins of the selected programs."""
    compiled: int
    reused: int
    removed: tuple[str, ...]
    """Files that the manifest does not name and that were taken out of the store."""
    warnings: dict[Key, str]
    """The compiler's log of this run's compilations, by program and architecture, where there was one."""
    digest: str | None
    """SHA-256 of the manifest's bytes; None when it was not written, because `stale` is not empty."""
    stale: tuple[Key, ...]
    """Programs outside the selection whose cubins are not those of the sources: a full build is needed to publish."""
    seconds: float


def build(
    selection: Selection | None = None,
    *,
    tree: Tree | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    locked: bool = False,
    executor: str | None = None,
) -> BuildReport:
    """Make the selected programs' cubins and publish manifest and store.

    selection: None for all programs. With a selection the manifest keeps its entries for the other programs, and is
      only written if they are still those of the sources.
    tree: None for the checkout that this code belongs to.
    jobs: compiler processes; None for one a core.
    progress: called for each cubin, from this thread.
    locked: publish nothing unless the manifest comes out as it is; VerificationError lists what differs.
    executor: dask://HOST:PORT, a Dask cluster that compiles instead of this machine's `jobs` processes.

    Raises TableError for tables that cannot be planned or a serial below the manifest's, BuildFailedError for cubins
    that cannot be made, ToolchainError without the pinned compiler (if anything has to be compiled), ChordError for a
    selection of unknown names.
    """
    started = time.monotonic()
    tree, selection, progress = tree or Tree.default(), selection or Selection(), progress or _silent
    tree.require_checkout()
    tree.require_sources()
    with exclusive(tree.out / "lock", waiting=lambda: progress(Step("waiting"))):
        work = jobs_module.read(tree)
        _require_growing_serial(tree, work.registry.serial)
        selected = work.selected(selection)
        finished = Finished(tree.work)
        processes = default_jobs() if jobs is None else jobs
        made = Maker(work.pin, processes, progress, finished, keep=True, executor=executor).make(selected)
        failures = _keep_failures(tree, made.failures)
        if failures:
            raise BuildFailedError(failures)
        stale = _complete(tree, work, made, finished)
        removed, digest = ((), None) if stale else _publish(tree, assemble(work, made.builds), made, locked)
        if not stale:
            finished.prune({job.require_closure().sha256 for job in work.jobs})
    return BuildReport(
        cubins=len(selected),
        compiled=made.compiled,
        reused=made.reused,
        removed=removed,
        warnings=made.warnings,
        digest=digest,
        stale=stale,
        seconds=time.monotonic() - started,
    )


def read_manifest(tree: Tree) -> Manifest | None:
    """The tree's manifest; None when there is none that this version of chord can read."""
    try:
        return canonical.decode(tree.manifest_bytes(), str(tree.manifest))
    except (FileNotFoundError, ManifestError):
        return None


def recorded_builds(manifest: Manifest | None) -> dict[Key, Build]:
    """Every build that a manifest records, by program and architecture."""
    operators = manifest.operators.values() if manifest else ()
    return {
        (name, arch): entry
        for operator in operators
        for name, program in operator.programs.items()
        for arch, entry in program.builds.items()
    }


def _require_growing_serial(tree: Tree, serial: int) -> None:
    """Raises TableError for a serial that goes back: deployments take a lower one for an older registry."""
    published = read_manifest(tree)
    if published is not None and serial < published.registry.serial:
        raise TableError(
            f"registry/registry.toml: serial: expected at least {published.registry.serial}, that of {tree.manifest}, "
            f"got {serial}: it only grows; raise it, or restore the manifest that belongs to these tables"
        )


def _silent(step: Step) -> None:
    pass


def _keep_failures(tree: Tree, failures: list[Failure]) -> tuple[Failure, ...]:
    """Leave each failure's rendered source and log for reading, in place of those of the build before."""
    shutil.rmtree(tree.failed, ignore_errors=True)
    kept = []
    for failure in failures:
        path = tree.failed / f"{failure.program}.{failure.arch}.cu"
        if failure.source:
            write_atomically(path, failure.source.encode())
        write_atomically(path.with_suffix(".log"), failure.log.encode())
        kept.append(replace(failure, kept_source=path if failure.source else None))
    return tuple(kept)


def _complete(tree: Tree, work: Work, made: Made, finished: Finished) -> tuple[Key, ...]:
    """Add the builds of the programs that were not selected; return those that would have to be compiled."""
    recorded = recorded_builds(read_manifest(tree))
    stale: list[Key] = []
    for job in work.jobs:
        if job.key in made.builds:
            continue
        data = finished.find(job.closure.sha256) if job.closure else None
        entry = recorded.get(job.key)
        try:
            if data is not None:
                made.builds[job.key] = describe(job, data)
                made.cubins[job.key] = data
            elif job.closure and entry and entry.closure_sha256 == job.closure.sha256:
                made.builds[job.key] = entry
            else:
                stale.append(job.key)
        except (CompileError, TableError):  # finished under limits that are no longer the table's
            stale.append(job.key)
    return tuple(stale)


def _publish(tree: Tree, manifest: Manifest, made: Made, locked: bool) -> tuple[tuple[str, ...], str]:
    """Store first, then the manifest that names it, then what neither needs; what was removed, and the digest."""
    data = canonical.encode(manifest)
    canonical.decode(data, str(tree.manifest))  # what could not be read must not be published
    if locked:
        _require_unchanged(tree, manifest, data)
    store = Store(tree.store)
    for cubin in made.cubins.values():
        store.write(cubin)
    if not _lies_there(tree, data):
        write_atomically(tree.manifest, data)
    removed = store.unlisted(manifest)
    for path in [*removed, *tree.store.glob(".*.tmp"), *tree.root.glob(".manifest.json.*.tmp")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return tuple(path.name for path in removed), canonical.digest(data)


def _lies_there(tree: Tree, data: bytes) -> bool:
    try:
        return tree.manifest_bytes() == data
    except (FileNotFoundError, ManifestError):
        return False


def _require_unchanged(tree: Tree, manifest: Manifest, data: bytes) -> None:
    if _lies_there(tree, data):
        return
    before, after = recorded_builds(read_manifest(tree)), recorded_builds(manifest)
    differing = [
        f"\n  {program} for {arch}: {_cubin_of(before, (program, arch))} is recorded, "
        f"the sources give {_cubin_of(after, (program, arch))}"
        for program, arch in sorted({*before, *after})
        if before.get((program, arch)) != after.get((program, arch))
    ]
    raise VerificationError(
        f"{tree.manifest} is not what its sources give; {len(differing)} cubins differ"
        f"{'' if differing else ', so routes, launch rules or other fields do (`chord build --check` lists them)'}; "
        f"if the sources are right, run `chord build` and commit the manifest:{''.join(differing)}"
    )


def _cubin_of(builds: dict[Key, Build], key: Key) -> str:
    return builds[key].cubin_sha256 if key in builds else "nothing"
