"""`python -m chord.checks.sanitize`: compute-sanitizer's four tools over every arm on the current GPU.

A job is one tool over some arms in a process of its own: few small cases, and only chord's kernels instrumented. Jobs
run side by side, each with a log; a table and the exit status say what they found. scripts/sanitize.sh sets this up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from chord.registry import Registry
from chord.registry.schema import Operator, Program

OPTIONS = {
    "racecheck": (
        "--racecheck-report",
        "all",
        "--racecheck-num-workers",
        "4",
    ),  # not a thread for each core, in each job
    "memcheck": ("--padding", "64"),
    "synccheck": (),
    # torch zeroes a workspace by its own kernel, which initcheck must see; copies of untouched outputs are no fault
    "initcheck": ("--check-api-memory-access", "no", "--kernel-name", "kernel_substring=FillFunctor"),
}
"""By tool, those that take longest first."""
COMMON = (
    *("--report-api-errors", "no", "--target-processes", "application-only", "--max-connections", "64"),
    *("--show-backtrace", "no", "--print-limit", "40"),  # a host's backtrace a finding takes longer than the check
)
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
"""A buffer of a pool has neighbours that belong to it: memcheck would take reads of them for legal."""
SLOWEST = (
    "racecheck-fused_router.few32",
    "racecheck-moe_w4a16_contiguous",
    "racecheck-fused_router.chain",
    "racecheck-fused_router.wide",
    "racecheck-moe_w4a16",
    "racecheck-moe_w4a16_masked",
)
"""Jobs that start first, so that none of them runs on alone when all others have ended."""
TOGETHER = "rows_and_plans"
"""The job of the operators whose kernels take a sanitizer no time."""
_OF_THEIR_OWN = ("fused_router", "moe_w4a16", "moe_w4a16_contiguous", "moe_w4a16_masked")
_running: set[subprocess.Popen[bytes]] = set()
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_CASES = re.compile(r"^(?:ok|FAILED) +\S+ on \S+, (\d+) cases", re.MULTILINE)
_RAN = re.compile(r"^(\d+) programs, (\d+) failed$", re.MULTILINE)
_KERNEL = re.compile(r"^=+ .*?\bat (?:block .* )?(\w+)(?:\(.*\))?\+0x", re.MULTILINE)


class Job(NamedTuple):
    """One tool over some programs, of the arms that `what` stands for."""

    tool: str
    what: str
    programs: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.tool}-{self.what}"


class Outcome(NamedTuple):
    """What a job found. wrong: programs with wrong results. kernels: those that findings name. broken: why the rest
    says nothing; empty if it does.
    """

    cases: int
    wrong: int
    errors: int
    hazards: int
    kernels: tuple[str, ...] = ()
    broken: str = ""

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.errors or self.hazards or self.broken)


def jobs(operators: Mapping[str, Operator], arch: str) -> list[Job]:
    """Every tool over every arm that has a program for the architecture, in the order in which they start.

    Starting takes a process several seconds, so that a job takes many arms, except of those that racecheck is slow at.
    """
    plan: dict[tuple[str, str], list[str]] = {}
    for operator, definition in sorted(operators.items()):
        for arm in definition.arms:
            of_arm = {n: p for n, p in definition.programs.items() if p.arm == arm and arch in p.builds}
            for tool in OPTIONS if of_arm else ():
                plan.setdefault((tool, _group(tool, operator, arm)), []).extend(_chosen(of_arm))
    found = [Job(tool, what, tuple(programs)) for (tool, what), programs in plan.items()]
    tools = list(OPTIONS)
    slow = {name: place for place, name in enumerate(SLOWEST)}
    return sorted(found, key=lambda job: (slow.get(job.name, len(slow)), tools.index(job.tool), job.name))


def _group(tool: str, operator: str, arm: str) -> str:
    """Which job of a tool an arm belongs to."""
    if operator not in _OF_THEIR_OWN:
        return TOGETHER
    return f"{operator}.{arm}" if (tool, operator) == ("racecheck", "fused_router") else operator


def _chosen(programs: Mapping[str, Program]) -> Iterator[str]:
    """Two of an arm that differ in everything: experts, type, block_m fixed or not, few tokens or many."""
    if any("num_experts" not in program.constants for program in programs.values()):
        yield from sorted(programs)
        return
    exact = sorted({program.num_tokens for program in programs.values() if program.num_tokens is not None})
    first, last = (exact[len(exact) // 2 - 1 if len(exact) > 1 else 0], exact[-1]) if exact else (None, None)
    for experts, logits, tokens, blocks in ((896, "f32", first, (8, None)), (384, "bf16", last, (None, 16))):
        for block_m in blocks:
            fixed = {"num_experts": experts, "logits": logits}
            found = [
                name
                for name, program in sorted(programs.items())
                if (program.num_tokens, program.block_m) == (tokens, block_m)
                and fixed.items() <= program.constants.items()
            ]
            if found:
                yield found[0]
                break


def command(job: Job, sanitizer: str) -> list[str]:
    """The words that run a job."""
    operators = sorted({name.partition(".")[0] for name in job.programs})
    filters = [word for name in operators for word in ("--kernel-name", f"kernel_substring={name}")]
    size = ["--tiny", "--brief"] if job.tool == "racecheck" else ["--tiny"]  # it is the slowest by far
    checks = [sys.executable, "-m", "chord.checks", *size, "--only", ",".join(job.programs)]
    return [sanitizer, "--tool", job.tool, *OPTIONS[job.tool], *COMMON, *filters, *checks]


def judge(job: Job, log: str) -> Outcome:
    """Reads a job's output. What is not there counts as broken, not as clean."""
    summaries, ran = list(_SUMMARY.finditer(log)), _RAN.search(log)
    cases = sum(int(number) for number in _CASES.findall(log))
    errors = sum(int(found[1] or 0) for found in summaries)
    hazards = sum(int(found[2] or 0) for found in summaries)
    broken = ""
    if not summaries or ran is None:
        broken = "no summary of the tool" if ran is not None else "the checks did not end"
    elif int(ran[1]) != len(job.programs) or not cases:
        broken = f"expected {len(job.programs)} programs to run, got {ran[1]}"
    kernels = tuple(sorted(set(_KERNEL.findall(log))))
    return Outcome(cases, int(ran[2]) if ran else 0, errors, hazards, kernels, broken)


def run(job: Job, sanitizer: str, folder: Path, timeout_s: float) -> tuple[Job, Outcome, float]:
    """Runs one job, its log in `folder`; the seconds it took come last. A job beyond the timeout is ended."""
    log, start = folder / f"{job.name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603 - the sanitizer that the user named or has on the PATH
            command(job, sanitizer),
            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
        finally:
            _running.discard(process)
    outcome = judge(job, log.read_text(encoding="utf-8", errors="replace"))
    seconds = time.monotonic() - start
    if seconds >= timeout_s:
        outcome = outcome._replace(broken=f"ended after {timeout_s:.0f} s")
    return job, outcome, seconds


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the tool and the process that it watches."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def table(outcomes: Sequence[tuple[Job, Outcome, float]]) -> str:
    """One line a job, one in all."""
    lines = [f"{'job':36}{'cases':>7}{'wrong':>7}{'errors':>8}{'hazards':>9}{'seconds':>9}"]
    for job, outcome, seconds in outcomes:
        numbers = f"{outcome.cases:7}{outcome.wrong:7}{outcome.errors:8}{outcome.hazards:9}{seconds:9.1f}"
        notes = "; ".join(filter(None, (outcome.broken, ", ".join(outcome.kernels))))
        lines.append(f"{job.name:36}{numbers}  {notes}".rstrip())
    bad = sum(not outcome.clean for _, outcome, _ in outcomes)
    lines.append(f"{len(outcomes)} jobs, {sum(o.cases for _, o, _ in outcomes)} cases, {bad} jobs not clean")
    return "\n".join(lines)


def main() -> int:
    """0 when every job was clean, 1 when one was not, 2 when nothing could be run."""
    what = "Run compute-sanitizer's four tools over small cases of every arm; exit 1 for any finding."
    parser = argparse.ArgumentParser(prog="scripts/sanitize.sh", description=what)
    parser.add_argument("--jobs", "-j", type=int, default=6, help="processes at a time (default 6)")
    parser.add_argument("--only", default="*", help="shell pattern of jobs, such as 'racecheck-*' or '*-moe_w4a16'")
    parser.add_argument("--out", type=Path, default=Path("build/out/sanitize"), help="folder for the logs")
    parser.add_argument("--timeout", type=float, default=240.0, help="most seconds for a job (default 240)")
    parser.add_argument("--list", action="store_true", help="show the jobs' commands and run nothing")
    parser.add_argument("--arch", help="with --list: for this architecture instead of the present GPU's")
    options = parser.parse_args()
    if options.arch and not options.list:
        parser.error("--arch: expected with --list; jobs run on the present GPU")
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None and not options.list:
        print("expected compute-sanitizer on the PATH, found none: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    arch = options.arch or _present_arch()
    if not arch:
        print(
            "expected a CUDA device, torch sees none; --list --arch sm_90a shows the jobs without one", file=sys.stderr
        )
        return 2
    every = jobs(Registry.open().manifest.operators, arch)
    plan = [job for job in every if fnmatchcase(job.name, options.only)]
    if options.list or not plan:
        print("\n".join(" ".join(command(job, "compute-sanitizer")) for job in plan), end="\n" if plan else "")
        if not plan:
            known = ", ".join(job.name for job in every) or f"none for {arch}; `chord ls` shows the architectures"
            print(f"--only: expected a pattern of some job, got {options.only!r}; there are {known}", file=sys.stderr)
        return 0 if plan else 2
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for found in pool.map(lambda job: run(job, str(sanitizer), options.out, options.timeout), plan):
                outcomes.append(found)
                print(table([found]).splitlines()[1], flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _kill(process)
            raise
    print("\n" + table(outcomes))
    return 0 if all(outcome.clean for _, outcome, _ in outcomes) else 1


def _present_arch() -> str:
    """The present GPU's; empty without one."""
    import torch

    from chord import _runtime

    if not torch.cuda.is_available():
        return ""
    return _runtime.architecture(torch.cuda.current_device())


if __name__ == "__main__":
    sys.exit(main())
