"""Qualifying in several processes at once: the same verdicts as suites.qualify_all, in a fraction of the time.

Most of a check's time is the host's. A shard is a list of programs that one process runs by `python -m chord.checks`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from chord import _runtime
from chord.checks.qualify import Verdict, matches
from chord.errors import ChordError
from chord.registry.schema import Program

ROUTER_PROGRAMS = 24
"""Router programs of a shard. They share nothing; the others share their exact results and stay together."""
TOGETHER = {"w4a16_unpack": "w4a16_pack"}
"""Operators that are checked by each other."""


def shards(programs: Mapping[str, Program], only: str = "*") -> list[list[str]]:
    """Names of the programs that `only` means, each in one shard; the shards that take longest, GEMMs, come first."""
    groups: dict[str, list[str]] = {}
    for name in sorted(programs):
        operator = name.partition(".")[0]
        if matches(name, only) or (operator == "route_plan" and matches(operator, only)):
            groups.setdefault(TOGETHER.get(operator, operator), []).append(name)
    split = []
    for operator, names in groups.items():
        size = ROUTER_PROGRAMS if operator == "fused_router" else len(names)
        split += [names[at : at + size] for at in range(0, len(names), size)]
    return sorted(split, key=lambda names: not names[0].startswith("moe_w4a16"))


def qualify_in_processes(
    device: int,
    jobs: int,
    *,
    tiny: bool = False,
    only: str = "*",
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """As qualify_all, `jobs` processes at a time. Raises ChordError with the output of a process that fails."""
    plan = shards(_runtime.registry().programs(arch=_runtime.architecture(device)), only)
    found: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="chord-qualify-") as folder, ThreadPoolExecutor(jobs) as pool:
        files = [Path(folder) / f"{number}.json" for number in range(len(plan))]
        running = [pool.submit(_run, names, file, device, tiny) for names, file in zip(plan, files, strict=True)]
        try:
            for future in as_completed(running):
                for verdict in future.result():
                    found.append(verdict)
                    progress(verdict)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(found)


def write_verdicts(verdicts: Iterable[Verdict], path: Path) -> None:
    """What a shard's process hands back."""
    path.write_text(json.dumps(list(verdicts)), encoding="utf-8")


def _run(names: list[str], file: Path, device: int, tiny: bool) -> list[Verdict]:
    words = ["--only", ",".join(names), "--verdicts", str(file), "--device", str(device), *(["--tiny"] if tiny else [])]
    command = [sys.executable, "-m", "chord.checks", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if not file.is_file():  # status 1 is a program that failed its checks, which its verdict says
        raise ChordError(f"checking {names[0]} and {len(names) - 1} more ended with {done.returncode}: {done.stderr}")
    return [Verdict(*verdict) for verdict in json.loads(file.read_text(encoding="utf-8"))]
