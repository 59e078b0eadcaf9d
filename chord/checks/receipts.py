"""Receipts of qualifying runs: what this GPU is, what ran on it, and the file that says so."""

from __future__ import annotations

import datetime
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

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

Progress = Callable[[Verdict], None]
"""Is told of each verdict when it is there."""

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


def make(verdicts: Sequence[Verdict], device: int, *, tiny: bool, complete: bool = True) -> Receipt:
    """The receipt of a run on a device. complete: whether the run has ended with all that it was to check. Raises
    ValueError for a program with two verdicts: which of them would count?
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
        complete=complete,
        checks={operator: checks_of(operator) for operator in operators},
        programs={verdict.program: _outcome(verdict) for verdict in verdicts},
    )


class Journal:
    """The receipt of a run that goes on: a file that has each program's outcome as soon as its checks have ended.

    A context: whatever ends the run, even a kill, leaves a receipt of what was checked by then, which says that it is
    not complete. It is signed, if there is a key, when the context is left.
    """

    def __init__(self, folder: Path, device: int, *, tiny: bool, key: Path | None = None) -> None:
        self.path: Path | None = None
        """Its file, once there is a verdict."""
        self._folder, self._device, self._tiny, self._key = folder, device, tiny, key
        self._verdicts: list[Verdict] = []

    def add(self, verdict: Verdict) -> None:
        """A program whose checks have all ended."""
        self._verdicts.append(verdict)
        self._write(complete=False)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._verdicts:
            path = self._write(complete=kind is None)
            if self._key is not None:
                receipts.sign(path, self._key)

    def _write(self, *, complete: bool) -> Path:
        receipt = make(sorted(self._verdicts), self._device, tiny=self._tiny, complete=complete)
        self.path = self.path or _unused(self._folder, receipt)
        write_atomically(self.path, receipts.encode(receipt))
        return self.path

    def __str__(self) -> str:
        return f"{self.path}, not complete: it has the {len(self._verdicts)} programs whose checks had ended"


def recorded(check: Callable[[Progress], list[Verdict]], show: Progress, journal: Journal) -> list[Verdict]:
    """What `check` finds, whose verdicts go to `show` and into the journal as they come.

    Whatever ends it early, a request to terminate as well, is raised again once stderr says what the receipt has.
    """

    def heard(verdict: Verdict) -> None:
        show(verdict)
        journal.add(verdict)

    try:
        with _ended_by_signals(), journal:
            return check(heard)
    except BaseException:
        if journal.path is not None:
            print(f"ended early; receipt: {journal}", file=sys.stderr, flush=True)
        raise


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, a request to terminate raises SystemExit, so that what is under way is brought to an end in order."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unused(folder: Path, receipt: Receipt) -> Path:
    """A file of its own for a receipt."""
    words = re.sub(r"[^a-z0-9]+", "-", receipt.gpu.lower()).strip("-")
    time = re.sub(r"\D", "", receipt.date)
    path = folder / f"{words}-{receipt.manifest_sha256[:12]}-{time}.json"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{words}-{receipt.manifest_sha256[:12]}-{time}-{number}.json"
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
