"""Getting the cubins of a list of jobs: those that are finished already, and the others from the compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chord.build.cluster import ClusterPool
from chord.build.finished import Finished
from chord.build.inspect import describe
from chord.build.jobs import Job, Key
from chord.build.nvrtc import Request, Result
from chord.build.pool import CompilerPool
from chord.build.toolchain import ToolchainPin
from chord.errors import CompileError, TableError
from chord.registry.schema import Build

Outcome = Literal["waiting", "reused", "compiled", "failed"]


@dataclass(frozen=True)
class Step:
    """One thing that happened, for whoever shows progress. `waiting` (for another build) has no program."""

    outcome: Outcome
    done: int = 0
    """Cubins that are finished or have failed."""
    total: int = 0
    program: str = ""
    arch: str = ""


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class Failure:
    """One cubin that could not be made."""

    program: str
    arch: str
    where: str
    """File and line, as far as they are known."""
    log: str
    """The compiler's log, or what is wrong with the table or template."""
    source: str
    """The rendered source, empty when there is none."""
    kept_source: Path | None = None
    """Where the rendered source was left for reading."""

    @property
    def headline(self) -> str:
        """Program, architecture, file and line."""
        return ": ".join(filter(None, [f"{self.program} for {self.arch}", self.where]))

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"    {line}" for line in self.log.splitlines()]
        if self.kept_source:
            lines.append(f"    rendered source: {self.kept_source}")
        return "\n".join(lines)


@dataclass
class Made:
    """What came of the jobs."""

    builds: dict[Key, Build] = field(default_factory=dict)
    cubins: dict[Key, bytes] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    warnings: dict[Key, str] = field(default_factory=dict)
    """What the compiler said about cubins that it made in this run."""
    compiled: int = 0
    reused: int = 0


class Maker:
    """Makes cubins with up to `jobs` compiler processes, which are started only if there is something to compile."""

    def __init__(
        self,
        pin: ToolchainPin,
        jobs: int,
        progress: Progress,
        finished: Finished | None,
        keep: bool,
        executor: str | None = None,
    ) -> None:
        """Without `finished` everything is compiled; with `keep` what is compiled is added to it.

        executor: dask://HOST:PORT, a cluster that compiles instead of this machine.
        """
        self._pin = pin
        self._jobs = jobs
        self._executor = executor
        self._progress = progress
        self._finished = finished
        self._keep = keep

    def make(self, wanted: Iterable[Job]) -> Made:
        """Make all that can be made; what cannot is among the failures. Raises ToolchainError without the compiler."""
        jobs = {job.key: job for job in wanted}
        made = Made()
        requests: dict[Key, Request] = {}
        for key, job in jobs.items():
            if job.closure is None:
                self._fail(made, job, job.problem, len(jobs))
            elif not self._reuse(made, job, len(jobs)):
                requests[key] = job.request
        if requests:
            with self._pool(len(requests)) as pool:
                for key, result in pool.compile_all(requests):
                    self._take(made, jobs[key], result, len(jobs))
        made.failures.sort(key=lambda failure: list(jobs).index((failure.program, failure.arch)))
        return made

    def _pool(self, requests: int) -> CompilerPool | ClusterPool:
        if self._executor is None:
            return CompilerPool(self._pin, min(self._jobs, requests))
        return ClusterPool(self._pin, self._executor)

    def _reuse(self, made: Made, job: Job, total: int) -> bool:
        data = self._finished.find(job.require_closure().sha256) if self._finished else None
        if data is None:
            return False
        try:
            made.builds[job.key] = describe(job, data)
        except (CompileError, TableError) as error:  # the table's limits may have changed since it was made
            self._fail(made, job, str(error), total)
            return True
        made.cubins[job.key] = data
        made.reused += 1
        self._report(made, job, "reused", total)
        return True

    def _take(self, made: Made, job: Job, result: Result, total: int) -> None:
        if result.cubin is None:
            self._fail(made, job, result.log, total)
            return
        try:
            build = describe(job, result.cubin)
            _refuse_serialised(result.log)
        except (CompileError, TableError) as error:
            self._fail(made, job, "\n".join(filter(None, [str(error), result.log.strip()])), total)
            return
        made.builds[job.key] = build
        made.cubins[job.key] = result.cubin
        made.compiled += 1
        if result.log.strip():
            made.warnings[job.key] = result.log
        if self._finished and self._keep:
            self._finished.add(job.require_closure().sha256, result.cubin)
        self._report(made, job, "compiled", total)

    def _fail(self, made: Made, job: Job, log: str, total: int) -> None:
        made.failures.append(Failure(*job.key, where=_first_place(log), log=log, source=job.source))
        self._report(made, job, "failed", total)

    def _report(self, made: Made, job: Job, outcome: Outcome, total: int) -> None:
        self._progress(Step(outcome, len(made.builds) + len(made.failures), total, *job.key))


def _refuse_serialised(log: str) -> None:
    """Raises CompileError when the compiler gave up overlapping wgmma instructions: C7510 to C7519, notes excepted."""
    if re.search(r"\(C751\d\) Potential Performance Loss", log):
        raise CompileError(
            "the compiler serialises wgmma instructions: expected them to overlap; use fewer registers, or leave none "
            "of them in flight where the compiler says that they cross"
        )


def _first_place(log: str) -> str:
    """`file:line` of the first error in a log: NVRTC writes `file(line): error`, we write `file:line: ...`."""
    theirs = re.search(r"^(\S+)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE)
    if theirs:
        return f"{theirs[1]}:{theirs[2]}"
    ours = re.match(r"(\S+:\d+): ", log)
    return ours[1] if ours else ""
