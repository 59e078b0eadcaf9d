"""Receipts: which GPU ran which checks against which cubin, one JSON file a run of `chord qualify`.

They lie in registry/receipts beside the manifest, and in a folder that a user names. They speak of cubins by SHA-256,
so that one stays true for every cubin that a later registry still has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from chord.errors import ReceiptError, SignatureError
from chord.registry import signature
from chord.registry.decoding import RECORD_BYTES, canonical_json, decode_json, read_bounded
from chord.registry.schema import Count, Sha256

FOLDER = Path("registry", "receipts")
"""Where a registry's own receipts lie, in its folder."""
_MOST_FILES = 4096
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class DriverVersion(_Strict, frozen=True, kw_only=True):
    cuda: Count
    """As cuDriverGetVersion reports it, for example 13000."""
    nvidia: Text | None
    """The display driver's own version, where the system tells it."""


class Outcome(_Strict, frozen=True, kw_only=True):
    """What became of one program."""

    cubin_sha256: Sha256
    cases: Count
    passed: bool
    problems: tuple[Text, ...] = ()
    """The first few; all of them were printed."""


class Receipt(_Strict, frozen=True, kw_only=True):
    """The content of a receipt, schema 1."""

    schema: Literal[1]
    date: Text
    """UTC, ISO 8601."""
    gpu: Text
    arch: Text
    driver: DriverVersion
    software: dict[str, Text]
    """Versions of chord, torch and Python."""
    manifest_sha256: Sha256
    sanitizer: Text | None
    """The tool that watched the run, if any."""
    tiny: bool
    """Whether the inputs were those that suit a sanitizer."""
    complete: bool = True
    """Whether the run came to its end. What it has of a program holds all the same: it has none without a verdict."""
    checks: dict[str, tuple[Text, ...]]
    """What was checked, by operator."""
    programs: dict[str, Outcome]


@dataclass(frozen=True)
class Run:
    """One cubin's line in a receipt."""

    gpu: str
    passed: bool
    cases: int
    date: str
    file: Path
    unproven: str = ""
    """Why the receipt does not count where a key is required; empty when it does."""


def encode(receipt: Receipt) -> bytes:
    """The file's bytes."""
    return canonical_json(receipt)


def decode(data: bytes, place: str) -> Receipt:
    """Raises ReceiptError naming `place` for anything but a receipt."""
    try:
        return decode_json(data, Receipt)
    except ValueError as error:
        raise ReceiptError(
            f"{place} is not a receipt: {error}; remove it, or write one with `chord qualify`"
        ) from error


def statement(receipt: Receipt, name: str, digest: str) -> dict[str, Any]:
    """in-toto's test result about a receipt's file and every cubin in it. `digest`: of the file `name`."""
    cubins = [
        {"name": program, "digest": {"sha256": outcome.cubin_sha256}}
        for program, outcome in sorted(receipt.programs.items())
    ]
    passed = [program for program, outcome in sorted(receipt.programs.items()) if outcome.passed]
    failed = sorted(set(receipt.programs).difference(passed))
    return {
        "_type": signature.STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}}, *cubins],
        "predicateType": signature.TEST_RESULT,
        "predicate": {
            "result": "FAILED" if failed else "PASSED",
            "configuration": [{"name": "manifest.json", "digest": {"sha256": receipt.manifest_sha256}}],
            "passedTests": passed,
            "failedTests": failed,
        },
    }


def sign(path: Path, key: Path) -> str:
    """Sign the receipt in a file; the key's id. Raises ReceiptError, SettingsError."""
    data = _read(path)
    made = statement(decode(data, str(path)), path.name, hashlib.sha256(data).hexdigest())
    return signature.sign(path, made, key)


class Receipts:
    """What the receipts of some folders say of cubins. Read when first asked."""

    def __init__(self, folders: Iterable[Path], keys: Mapping[str, Path]) -> None:
        """keys: files of public keys by where they came from, of each of which one must have signed a receipt."""
        self._folders = tuple({folder.absolute(): None for folder in folders})
        self._keys = dict(keys)
        self._runs: dict[str, list[Run]] | None = None

    def of(self, cubin_sha256: str) -> tuple[Run, ...]:
        """Every run of a cubin. Raises ReceiptError for a file in the folders that is no receipt."""
        if self._runs is None:
            self._runs = self._load()
        return tuple(self._runs.get(cubin_sha256, ()))

    def ran_on(self, cubin_sha256: str) -> tuple[str, ...]:
        """The GPUs on which a cubin ran, each once; behind it "(FAILED)" where it did not pass, "(not signed by a
        required key)" where no receipt of the pass counts.
        """
        runs = self.of(cubin_sha256)
        return tuple(gpu + _remark([run for run in runs if run.gpu == gpu]) for gpu in sorted({r.gpu for r in runs}))

    def suffices(self, cubin_sha256: str) -> bool:
        """Whether the cubin passed somewhere, by a receipt that counts, and failed nowhere: what `require` asks for."""
        runs = self.of(cubin_sha256)
        return all(run.passed for run in runs) and any(not run.unproven for run in runs)

    def require(self, place: str, cubin_sha256: str) -> None:
        """Raises ReceiptError naming `place` unless the cubin passed somewhere and failed nowhere."""
        runs = self.of(cubin_sha256)
        failed = [run for run in runs if not run.passed]
        if failed:
            raise ReceiptError(
                f"{place}: its checks failed on {failed[0].gpu} ({failed[0].file}), and CHORD_REQUIRE_RECEIPT=1 asks "
                f"for a pass; {_ADVICE}"
            )
        if not any(not run.unproven for run in runs):
            why = f"the receipt does not count ({runs[0].unproven})" if runs else "it was never run on hardware"
            where = ", ".join(map(str, self._folders))
            raise ReceiptError(
                f"{place}: CHORD_REQUIRE_RECEIPT=1 asks for a receipt of cubin {cubin_sha256}, in {where} there is "
                f"none: {why}; {_ADVICE}"
            )

    def _load(self) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = {}
        for path in self._files():
            data = _read(path)
            receipt, unproven = decode(data, str(path)), self._unproven(path, data)
            for outcome in receipt.programs.values():
                passed = outcome.passed and outcome.cases > 0
                run = Run(receipt.gpu, passed, outcome.cases, receipt.date, path, unproven)
                found.setdefault(outcome.cubin_sha256, []).append(run)
        return found

    def _files(self) -> list[Path]:
        files = [path for folder in self._folders if folder.is_dir() for path in sorted(folder.glob("*.json"))]
        if len(files) > _MOST_FILES:
            raise ReceiptError(f"{', '.join(map(str, self._folders))}: {len(files)} receipts, expected {_MOST_FILES}")
        return files

    def _unproven(self, path: Path, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        for source, keys in self._keys.items():
            try:
                signature.verify(path, digest, signature.TEST_RESULT, keys, source)
            except SignatureError as error:
                return str(error)
        return ""


def _remark(runs: Iterable[Run]) -> str:
    """What is to be said of some runs of a cubin on one kind of GPU."""
    if not all(run.passed for run in runs):
        return " (FAILED)"
    return " (not signed by a required key)" if all(run.unproven for run in runs) else ""


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, RECORD_BYTES)
    except OSError as error:
        raise ReceiptError(f"expected a receipt, cannot read {path} ({error.strerror})") from error


_ADVICE = "`chord qualify` writes receipts of the present GPU, and `chord ls` shows those that there are"
