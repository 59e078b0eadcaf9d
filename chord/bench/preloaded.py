"""What a program's first launch costs the host once it is preloaded, beside launches of programs in use.

`python -m chord.bench.preloaded OPERATOR [COUNT]` measures it in so many fresh processes, by default one, and prints a
line of JSON each. A launch after a pause costs many times a launch among others, of whatever program: so each first
launch is held against the same launch of a program in use, in the same state of host and GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chord import _runtime
from chord.checks.inputs import normal_case
from chord.checks.w4a16 import gemm_case, placed
from chord.router import prepare_fused_router
from chord.w4a16 import WeightShape, prepare_moe_w4a16
from chord.w4a16.launch import serves

OPERATORS = {"fused_router": 1, "moe_w4a16": 20}
"""Tokens of the first request."""
PAUSE_S = 0.05
BETWEEN = 20
"""Launches of a program in use right before a first launch, when the process is launching."""
ROUTER_TOKENS = (2, 4, 6, 12, 16, 20, 40, 300, 700, 1500)
_SHAPE = WeightShape(8, 256, 256)

Launch = Callable[[], object]


class FirstLaunches(NamedTuple):
    """Host times in microseconds, in a process that had launched nothing of chord's before."""

    preload_us: float
    first_after_pause_us: float
    """The process's first launch."""
    used_after_pause_us: float
    """The same launch after as long a pause, when the program is in use: a median."""
    steady_us: float
    """The same launch back to back: a median."""
    programs: dict[str, tuple[float, float]]
    """Of each other program: its first launch while the process launches, its steady median."""
    compilers: list[str]
    """Compiler libraries that are mapped now and were not before."""


def measure(operator: str) -> FirstLaunches:
    """Takes the measurements on the current GPU. The process must not have launched anything of chord's.

    Raises ValueError for anything but one of OPERATORS.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator: expected one of {', '.join(OPERATORS)}, got {operator!r}")
    torch.set_num_threads(1)
    prepare = _router_launches() if operator == "fused_router" else _gemm_launches()
    torch.cuda.synchronize()
    before = _compilers()
    start = time.perf_counter()
    for name in OPERATORS:
        _runtime.registry().preload(name)
    preload_us = (time.perf_counter() - start) * 1e6
    used_program, used = next(prepare)
    first = _after_pause(used)
    steady = _steady(used, 200)
    again = statistics.median(_after_pause(used) for _ in range(5))
    programs: dict[str, tuple[float, float]] = {}
    for program, launch in prepare:
        if program not in (used_program, *programs):
            torch.cuda.synchronize()
            for _ in range(BETWEEN):
                used()
            programs[program] = _timed(launch), _steady(launch, 60)
    return FirstLaunches(preload_us, first, again, steady, programs, sorted(_compilers() - before))


def in_fresh_processes(operator: str, count: int) -> list[FirstLaunches]:
    """`measure` in so many processes, one after the other. Raises RuntimeError with the output if one fails.

    They are forks of one that has imported everything and not touched CUDA: imports take longer than all the rest.
    """
    command = [sys.executable, "-m", "chord.bench.preloaded", operator, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode:
        raise RuntimeError(f"the process that measures first launches failed:\n{done.stderr}")
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [FirstLaunches(**process) for process in found]


def forked(work: Callable[[], object]) -> None:
    """Runs work in a fork of this process and waits for it. Raises ChildProcessError if it fails.

    The fork ends without the interpreter's own end, which would run what this process has registered.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise ChildProcessError(f"the forked process ended with {os.waitstatus_to_exitcode(status)}")
        return
    status = 1
    try:
        work()
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _router_launches() -> Iterator[tuple[str, Launch]]:
    """(program, prepared launch) of the first request's token count, then of others. Inputs are made at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = (OPERATORS["fused_router"], *ROUTER_TOKENS)
    cases = [normal_case(count, 896, torch.float32, device) for count in tokens]

    def prepare() -> Iterator[tuple[str, Launch]]:
        for case in cases:
            made = prepare_fused_router(case.logits, case.bias, top_k=16, block_m=8)
            yield made.program, made.launch

    return prepare()


def _gemm_launches() -> Iterator[tuple[str, Launch]]:
    """The same of the GEMM: the program that is routed, then every other one."""
    device = torch.device("cuda", torch.cuda.current_device())
    host = torch.device("cpu")  # where packing launches nothing of chord's
    case = placed(gemm_case(_SHAPE, OPERATORS["moe_w4a16"], 8, 8, "random", host), device)

    def prepare() -> Iterator[tuple[str, Launch]]:
        known = _runtime.registry().programs("moe_w4a16", _runtime.architecture(device.index))
        for program in (None, *(name for name, found in known.items() if serves(found, _SHAPE))):
            made = prepare_moe_w4a16(case.x, case.packed, case.plan, top_k=8, block_m=8, program=program)
            yield made.program, made.launch

    return prepare()


def _timed(launch: Launch) -> float:
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1e6


def _steady(launch: Launch, launches: int) -> float:
    torch.cuda.synchronize()
    found = statistics.median(_timed(launch) for _ in range(launches))
    torch.cuda.synchronize()
    return found


def _after_pause(launch: Launch) -> float:
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    return _timed(launch)


def _compilers() -> set[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    return {path for path in paths if "nvrtc" in path or "nvJitLink" in path}


if __name__ == "__main__":
    words = sys.argv[1:] if sys.argv[2:] else [*sys.argv[1:], "1"]
    if len(words) != 2 or not words[1].isdecimal():
        sys.exit(f"usage: python -m chord.bench.preloaded {'|'.join(OPERATORS)} [COUNT]")
    for _ in range(int(words[1])):
        forked(lambda: print(json.dumps(measure(words[0])._asdict())))
