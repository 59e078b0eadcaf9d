"""Receipts of qualifying runs: what this GPU is, what ran on it, and the file that says so."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from chord import _runtime
from chord._version import __version__
from chord.checks.qualify import Verdict
from chord.checks.suites import checks_of
from chord.errors import SettingsError
from chord.registry import receipts
from chord.registry.driver import default_driver
from chord.registry.files import write_atomically
from chord.registry.receipts import DriverVersion, Outcome, Receipt

_SHOWN = 3
_SHOWN_CHARACTERS = 400


def patterns(operators: Sequence[str] | None, only: str) -> str:
    """What qualify_all takes: `only`, within the operators if some are named. Raises NoProgramError."""
    if not operators:
        return only
    for name in operators:
        _runtime.operator(name)
    if only == "*":
        return ",".join(f"{name}.*" for name in operators)
    found = [name for pattern in only.split(",") for name in _matching(pattern, operators)]
    return ",".join(found) or "none of them"


def _matching(pattern: str, operators: Sequence[str]) -> list[str]:
    from chord.checks.qualify import matches

    registry = _runtime.registry()
    return [name for operator in operators for name in registry.programs(operator) if matches(name, pattern)]


def folder(named: Path | None) -> Path:
    """Where receipts go, checked before an hour of GPU time is spent. Raises SettingsError."""
    wanted = named or _runtime.registry().root / receipts.FOLDER
    there = wanted
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise SettingsError(f"{wanted}: expected a folder that can be written; name another with --receipt")
    return wanted


def make(verdicts: Sequence[Verdict], device: int, *, tiny: bool) -> Receipt:
    """The receipt of a run on a device that has just ended. Raises ValueError for a program with two verdicts: which
    of them would count?
    """
    names = [verdict.program for verdict in verdicts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected one verdict a program, got several of {', '.join(twice)}")
    operators = sorted({verdict.program.partition(".")[0] for verdict in verdicts})
    return Receipt(
        schema=1,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        gpu=torch.cuda.get_device_name(device),
        arch=_runtime.architecture(device),
        driver=DriverVersion(cuda=default_driver().version(), nvidia=_display_driver()),
        software={"chord": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        manifest_sha256=_runtime.registry().digest,
        sanitizer=_sanitizer(),
        tiny=tiny,
        checks={operator: checks_of(operator) for operator in operators},
        programs={verdict.program: _outcome(verdict) for verdict in verdicts},
    )


def write(receipt: Receipt, folder: Path, key: Path | None) -> Path:
    """Write a receipt as a file of its own, signed if there is a key; its path."""
    words = re.sub(r"[^a-z0-9]+", "-", receipt.gpu.lower()).strip("-")
    time = re.sub(r"\D", "", receipt.date)
    path = folder / f"{words}-{receipt.manifest_sha256[:12]}-{time}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{words}-{receipt.manifest_sha256[:12]}-{time}-{number}.json"
    write_atomically(path, receipts.encode(receipt))
    if key is not None:
        receipts.sign(path, key)
    return path


def _outcome(verdict: Verdict) -> Outcome:
    shown = tuple(problem[:_SHOWN_CHARACTERS] for problem in verdict.problems[:_SHOWN])
    return Outcome(cubin_sha256=verdict.cubin_sha256, cases=verdict.cases, passed=not verdict.problems, problems=shown)


def _display_driver() -> str | None:
    """The display driver's version, as Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found and found[0]


def _sanitizer() -> str | None:
    """Compute-sanitizer is part of the process that it watches."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return "compute-sanitizer" if "libsanitizer" in mapped else None
