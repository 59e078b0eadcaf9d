"""Results files (bench/results/<date>-<gpu>-<suite>.json): every published figure comes from one of them.

Times are microseconds, medians, with the 10th and 90th percentile. Peers are always of the same run.
"""

from __future__ import annotations

import datetime
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import torch

from chord import _paths, _runtime

SCHEMA = 1


class Row(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measured case. `peers` holds medians by peer name, `chord` those of other ways to have chord do the work."""

    scenario: str
    tokens: int | None = None
    block_m: int | None = None
    proj: str | None = None
    rows_per_expert: int | None = None
    program: str | None = None
    cubin_sha256: str | None = None
    cubins: dict[str, str] = {}
    """SHA-256 by program, where `program` names several that run one after the other."""
    samples: int | None = None
    us: float
    p10: float | None = None
    p90: float | None = None
    bytes: int | None = None
    """What must be read and written at least."""
    peers: dict[str, float] = {}
    chord: dict[str, float] = {}


class Results(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One run of one suite on one GPU."""

    schema: int = SCHEMA
    suite: Literal["router", "w4a16", "host", "build", "layer"]
    date: str
    gpu: str
    driver: str
    torch: str
    commit: str
    peers: dict[str, str]
    """Version of each peer."""
    method: str
    flush: Literal["read", "write", "none"]
    steady_ms: int
    rows: list[Row]


def describe_run(
    suite: Literal["router", "w4a16", "host", "build", "layer"],
    method: str,
    flush: Literal["read", "write", "none"],
    steady_ms: int,
    peers: dict[str, str],
    commit: str | None = None,
) -> Results:
    """Empty results that say where and how they are being measured. commit: of the code, where git cannot tell."""
    return Results(
        suite=suite,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        gpu=torch.cuda.get_device_name(),
        driver=driver_version(),
        torch=str(torch.__version__),
        commit=commit or source_commit(),
        peers=peers,
        method=method,
        flush=flush,
        steady_ms=steady_ms,
        rows=[],
    )


def recorder(
    results: Results, progress: Callable[[Row], None], save: Callable[[Results], None]
) -> Callable[[Row], None]:
    """What a suite gives each row to as it is measured: kept, shown, and saved with those before it."""

    def add(row: Row) -> None:
        results.rows.append(row)
        progress(row)
        save(results)

    return add


def cubin_of(program: str, device: torch.device) -> str:
    """SHA-256 of the bytes that a program runs as on a device; empty on a CPU."""
    if device.type != "cuda":
        return ""
    operator = _runtime.operator(program.partition(".")[0])
    return operator.programs[program].builds[_runtime.architecture(device.index)].cubin_sha256


def file_name(results: Results, part: str = "") -> str:
    """`<date>-<gpu>-<suite>.json`, the GPU without its maker and in lower case; `<suite>-<part>` for some scenarios."""
    gpu = re.sub(r"[^a-z0-9]+", "-", results.gpu.lower().removeprefix("nvidia").strip()).strip("-")
    return f"{results.date}-{gpu}-{results.suite}{f'-{part}' if part else ''}.json"


def write(results: Results, path: Path) -> None:
    """Times are rounded to nanoseconds; one row a line, so that a diff of two runs can be read."""
    for row in results.rows:
        row.us, row.peers = round(row.us, 3), {name: round(us, 3) for name, us in row.peers.items()}
        row.chord = {name: round(us, 3) for name, us in row.chord.items()}
        row.p10 = None if row.p10 is None else round(row.p10, 3)
        row.p90 = None if row.p90 is None else round(row.p90, 3)
    head = msgspec.structs.asdict(results)
    head.pop("rows")
    lines = ",\n".join("  " + msgspec.json.encode(row).decode() for row in results.rows)
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read(path: Path) -> Results:
    """Raises ValueError naming the file for another schema or a malformed one."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a results file ({error})") from error
    if results.schema != SCHEMA:
        raise ValueError(f"{path}: expected results schema {SCHEMA}, got {results.schema}")
    return results


def source_commit() -> str:
    """The commit of the code that runs, "-dirty" added when chord/ or templates/ differ from it; "unknown" without
    git.
    """
    root = _paths.data_root()
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 - whichever git the user has
            cwd=root, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "chord", "templates", "registry"],  # noqa: S607
            cwd=root, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def driver_version() -> str:
    """NVIDIA's driver version as the kernel module states it, else "unknown"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else "unknown"
