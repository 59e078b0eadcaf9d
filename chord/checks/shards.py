"""Qualifying in several processes at once: the same verdicts as suites.qualify_all, in a fraction of the time.

Most of a check's time is the host's. A shard is a list of programs that one process runs by `python -m chord.checks`,
which hands each verdict over when it has it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from chord import _runtime
from chord.checks.qualify import Verdict, matches
from chord.errors import ChordError
from chord.registry.schema import Program

FIRST = ("moe_w4a16_combine", "moe_w4a16_contiguous", "moe_w4a16", "moe_w4a16_masked", "fused_router")
"""The operators whose shards take longest, longest first."""
_QUICK = "the others"


def shards(programs: Mapping[str, Program], only: str = "*") -> list[list[str]]:
    """Names of the programs that `only` means, each in one shard; the shards that take longest come first.

    Programs that share inputs and their exact results stay together: a GEMM operator's, and the router's of one number
    of experts and type of logits. The operators that take a second or two share one process.
    """
    groups: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name, program in sorted(programs.items()):
        operator = name.partition(".")[0]
        if matches(name, only) or (operator == "route_plan" and matches(operator, only)):
            traits = (str(program.constants[key]) for key in ("num_experts", "logits") if operator == "fused_router")
            order = FIRST.index(operator) if operator in FIRST else len(FIRST)
            kind = operator if operator in FIRST else _QUICK
            groups.setdefault((order, (kind, *traits)), []).append(name)
    return [names for _, names in sorted(groups.items())]


def qualify_in_processes(
    device: int,
    jobs: int,
    *,
    tiny: bool = False,
    only: str = "*",
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """As qualify_all, `jobs` processes at a time; progress gets each verdict when its process has it.

    Raises ChordError with the output of processes that failed, once the others are done. However it ends, its processes
    end with it.
    """
    plan = shards(_runtime.registry().programs(arch=_runtime.architecture(device)), only)
    found: list[Verdict] = []
    news: queue.SimpleQueue[Verdict | Future[None]] = queue.SimpleQueue()
    running = _Processes(max(1, (os.cpu_count() or 1) // jobs))
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for names in plan:
                words = ["--only", ",".join(names), "--device", str(device), *(["--tiny"] if tiny else [])]
                pool.submit(running.run, words, news.put).add_done_callback(news.put)
            left, failures = len(plan), []
            while left:
                new = news.get()
                if isinstance(new, Verdict):
                    found.append(new)
                    progress(new)
                    continue
                left -= 1
                if error := new.exception():
                    failures.append(error)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            running.end()
            raise
    if failures:
        raise ChordError("\n".join(map(str, failures))) from failures[0]
    return sorted(found)


class _Processes:
    """Those that run. They share the CPU's cores: torch would take all of them in each, and wait for itself."""

    def __init__(self, threads: int) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(self, words: list[str], heard: Callable[[Verdict], None]) -> None:
        """One process, to its end. Raises ChordError."""
        command = [sys.executable, "-m", "chord.checks", "--verdicts", *words]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=self._environment
            )
            self._running.add(process)
            try:
                if self._ended:
                    process.terminate()
                with process:
                    assert process.stdout is not None  # noqa: S101 - it is a pipe
                    for line in process.stdout:
                        if verdict := decode(line):
                            heard(verdict)
            finally:
                self._running.discard(process)
            if process.returncode not in (0, 1):  # 1 is a program that failed its checks, which its verdict says
                complaints.seek(0)
                raise ChordError(
                    f"checking {words[1].replace(',', ', ')} ended with {process.returncode}: {complaints.read()}"
                )

    def end(self) -> None:
        """Ends all of them, and those that are about to start."""
        self._ended = True
        for process in tuple(self._running):
            process.terminate()


_MARK = "verdict: "


def encode(verdict: Verdict) -> str:
    """A verdict as the line by which a process hands it over."""
    return _MARK + json.dumps(verdict)


def decode(line: str) -> Verdict | None:
    """None for a line that is something else, as a library may print one."""
    return Verdict(*json.loads(line.removeprefix(_MARK))) if line.startswith(_MARK) else None
