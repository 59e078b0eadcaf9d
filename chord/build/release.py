"""The store of a release: complete and equal to the manifest, or no release. Used by the wheel's build hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chord.build import jobs as jobs_module
from chord.build.builder import BuildFailedError, recorded_builds
from chord.build.jobs import Key
from chord.build.make import Maker, Step
from chord.build.pool import default_jobs
from chord.build.tree import Tree
from chord.errors import VerificationError
from chord.registry import canonical
from chord.registry.schema import Build
from chord.registry.store import Store


def complete_store(root: Path, report: Callable[[str], None]) -> list[Path]:
    """Paths of the cubins that the manifest under `root` names, sorted: all there, each with its hash.

    Missing and damaged ones are compiled. Raises VerificationError when the manifest is not that of the sources or a
    cubin comes out different, and what builder.build raises.
    """
    tree = Tree(root)
    if not tree.manifest.is_file():
        raise VerificationError(f"{tree.manifest}: expected the committed manifest, found no file; run `chord build`")
    manifest = canonical.decode(tree.manifest_bytes(), str(tree.manifest))
    recorded = recorded_builds(manifest)
    work = jobs_module.read(tree)
    planned = {job.key: job for job in work.jobs}
    stale = [
        key
        for key in sorted({*planned, *recorded})
        if key not in planned
        or key not in recorded
        or planned[key].require_closure().sha256 != recorded[key].closure_sha256
    ]
    if stale:
        raise VerificationError(f"{tree.manifest} is not that of the sources; run `chord build`: {_listed(stale)}")
    store = Store(tree.store)
    absent = [key for key, entry in recorded.items() if not _intact(store, entry)]
    if absent:
        report(f"compiling {len(absent)} of {len(recorded)} cubins, which {tree.store} does not have")
        maker = Maker(work.pin, default_jobs(), lambda step: _tell(step, report), finished=None, keep=False)
        made = maker.make([planned[key] for key in absent])
        if made.failures:
            raise BuildFailedError(tuple(made.failures))
        wrong = [key for key, entry in made.builds.items() if entry != recorded[key]]
        if wrong:
            raise VerificationError(f"cubins that are not the manifest's came out of the compiler: {_listed(wrong)}")
        for cubin in made.cubins.values():
            store.write(cubin)
    return sorted({store.path_of(entry.cubin_sha256) for entry in recorded.values()})


def _intact(store: Store, entry: Build) -> bool:
    try:
        store.read_verified(entry.cubin_sha256, entry.size_bytes)
    except VerificationError:
        return False
    return True


def _tell(step: Step, report: Callable[[str], None]) -> None:
    if step.done % 50 == 0 or step.done == step.total:
        report(f"{step.done} of {step.total} cubins")


def _listed(keys: list[Key]) -> str:
    shown = ", ".join(f"{program} for {arch}" for program, arch in keys[:10])
    return f"{shown}, and {len(keys) - 10} more" if len(keys) > 10 else shown
