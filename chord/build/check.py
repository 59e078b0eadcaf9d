"""A manifest against what its sources give, changing nothing: `chord build --check`, `chord verify --rebuild`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from chord.build import jobs as jobs_module
from chord.build.assemble import assemble
from chord.build.builder import BuildFailedError, recorded_builds
from chord.build.finished import Finished
from chord.build.jobs import Job, Key, Selection, Work
from chord.build.make import Maker, Progress, Step
from chord.build.pool import default_jobs
from chord.build.tree import Tree
from chord.registry import canonical
from chord.registry.schema import Build, Manifest


@dataclass(frozen=True)
class Difference:
    """One place where the manifest and the sources disagree."""

    program: str
    """Empty when it is about the manifest as a whole."""
    arch: str
    what: str

    def __str__(self) -> str:
        return f"{self.program} for {self.arch}: {self.what}" if self.program else self.what


@dataclass(frozen=True)
class CheckReport:
    """What a check found; equal when `differences` is empty."""

    cubins: int
    compiled: int
    reused: int
    differences: tuple[Difference, ...]


def check(
    selection: Selection | None = None,
    *,
    tree: Tree | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    fresh: bool = False,
) -> CheckReport:
    """Compare the tree's manifest with its sources. Writes no file; works on an installed package too.

    Cubins that `chord build` finished on this machine are not compiled again unless `fresh` (`chord verify --rebuild`);
    nor are those whose closures differ from the manifest's already.
    Other arguments and errors as builder.build; ManifestError when the manifest cannot be read.
    """
    tree, selection = tree or Tree.default(), selection or Selection()
    tree.require_sources()
    manifest = canonical.decode(tree.manifest_bytes(), str(tree.manifest)) if tree.manifest.is_file() else None
    work = jobs_module.read(tree)
    selected = work.selected(selection)
    recorded = recorded_builds(manifest)
    differences, same_closure = _compare_closures(selected, recorded)
    finished = None if fresh else Finished(tree.work)
    processes = default_jobs() if jobs is None else jobs
    made = Maker(work.pin, processes, progress or _silent, finished, keep=False).make(same_closure)
    if made.failures:
        raise BuildFailedError(tuple(made.failures))
    differences += [found for key, build in made.builds.items() for found in _compare_builds(key, recorded[key], build)]
    planned = {job.key for job in work.jobs}
    differences += [Difference(*key, "is in the manifest, not in the tables") for key in recorded if key not in planned]
    if not differences:
        differences += _compare_rest(tree, work, manifest, recorded)
    return CheckReport(len(selected), made.compiled, made.reused, tuple(differences))


def _silent(step: Step) -> None:
    pass


def _compare_closures(selected: list[Job], recorded: dict[Key, Build]) -> tuple[list[Difference], list[Job]]:
    """Differences that need no compiler, and the jobs that have none (or no closure: making them says why)."""
    differences, same = [], []
    for job in selected:
        entry = recorded.get(job.key)
        if entry is None:
            differences.append(Difference(*job.key, "is in the tables, not in the manifest"))
        elif job.closure is not None and entry.closure_sha256 != job.closure.sha256:
            differences.append(Difference(*job.key, _unequal("closure", entry.closure_sha256, job.closure.sha256)))
        else:
            same.append(job)
    return differences, same


def _compare_builds(key: Key, recorded: Build, made: Build) -> Iterator[Difference]:
    if recorded.cubin_sha256 != made.cubin_sha256:
        yield Difference(*key, _unequal("cubin", recorded.cubin_sha256, made.cubin_sha256))
    elif recorded != made:
        for field in recorded.__struct_fields__:
            theirs, ours = getattr(recorded, field), getattr(made, field)
            if theirs != ours:
                yield Difference(*key, _unequal(field, theirs, ours))


def _compare_rest(
    tree: Tree, work: Work, manifest: Manifest | None, recorded: dict[Key, Build]
) -> Iterator[Difference]:
    """What lies outside the builds: routes, launch rules, options, the registry's version, and the bytes' form."""
    if manifest is None:
        yield Difference("", "", f"{tree.manifest}: expected the manifest, found no file; write it with `chord build`")
        return
    expected = assemble(work, recorded)
    theirs, ours = msgspec.to_builtins(manifest), msgspec.to_builtins(expected)
    for path in _unequal_paths(theirs, ours, ""):
        yield Difference("", "", f"manifest.json: {path} is not what the sources say; write it with `chord build`")
    if manifest == expected and tree.manifest_bytes() != canonical.encode(expected):
        yield Difference("", "", "manifest.json: its bytes are not in canonical form; write it with `chord build`")


def _unequal_paths(theirs: object, ours: object, path: str) -> Iterator[str]:
    """The innermost dictionary entries that differ, as dotted paths."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            yield from _unequal_paths(theirs.get(key), ours.get(key), f"{path}.{key}" if path else key)
    elif theirs != ours:
        yield path


def _unequal(what: str, recorded: object, made: object) -> str:
    return f"{what}: the manifest has {recorded}, the sources give {made}"
