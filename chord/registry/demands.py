"""What is asked of a registry when it is opened: pins, lock files and keys. All that are given must agree with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from chord import _settings
from chord.errors import PinMismatchError, RollbackError
from chord.registry import lock as lock_file
from chord.registry import signature
from chord.registry.decoding import decode_json
from chord.registry.lock import LOCK_NAME, Lock
from chord.registry.schema import Manifest, RegistryInfo

T = TypeVar("T")


class _Numbered(msgspec.Struct):
    """The serial of a manifest that is not believed otherwise."""

    registry: RegistryInfo


@dataclass(frozen=True)
class Demands:
    """By where each came from: an argument, a variable, or the registry's own folder."""

    pins: Mapping[str, str]
    locks: Mapping[str, Path]
    keys: Mapping[str, Path]

    @classmethod
    def gather(
        cls,
        settings: _settings.Settings,
        root: Path,
        *,
        pin: str | None,
        lock: Path | None,
        key: Path | None,
        relock: bool = False,
        resign: bool = False,
    ) -> Demands:
        """From arguments, settings and the folder `root`; no lock files if `relock`, no keys if `resign`.

        Raises SettingsError.
        """
        beside = root / LOCK_NAME
        locks = {
            "lock": lock,
            "CHORD_LOCK": settings.lock,
            "the registry's folder": beside if os.path.lexists(beside) else None,
        }
        return cls(
            pins=_given({"CHORD_PIN": settings.pin, "pin": None if pin is None else _settings.checked_pin(pin, "pin")}),
            locks={} if relock else _given(locks),
            keys={} if resign else _given({"key": key, "CHORD_KEY": settings.key}),
        )

    def check_bytes(self, path: Path, data: bytes, digest: str) -> tuple[dict[str, Lock], str | None]:
        """Steps 1 to 3, on the manifest's bytes alone: nothing in them is believed yet.

        1. every pin is their SHA-256; 2. so is every lock file's digest; 3. one of each file of keys has signed them.
        Returns the locks by what names them in errors, and the id of a key that signed. Raises PinMismatchError,
        RollbackError, LockError, SignatureError, SettingsError.
        """
        locks = {f"{source}: {file}": lock_file.read(file, source) for source, file in self.locks.items()}
        expected = {**self.pins, **{place: lock.manifest_sha256 for place, lock in locks.items()}}
        wrong = [f"{source} expects {pin}" for source, pin in expected.items() if pin != digest]
        if wrong:
            _refuse_rollback(path, data, locks)
            raise PinMismatchError(
                f"{path} has SHA-256 {digest}, {' and '.join(wrong)}; use the manifest that was pinned"
                + (", or accept this one with `chord lock`" if locks else "")
            )
        signed_by = None
        for source, file in self.keys.items():
            signed_by = signature.verify(path, digest, signature.PROVENANCE, file, source)
        return locks, signed_by


def check_locks(locks: Mapping[str, Lock], manifest: Manifest, digest: str) -> None:
    """Step 4: locks say nothing else of the manifest than it says itself. Raises LockError."""
    for place, lock in locks.items():
        lock_file.require_agreement(lock, place, manifest, digest)


def _refuse_rollback(path: Path, data: bytes, locks: Mapping[str, Lock]) -> None:
    """A manifest that a lock file does not name may be an old one, played again. Raises RollbackError."""
    try:
        serial = decode_json(data, _Numbered).registry.serial
    except ValueError:
        return
    for place, lock in locks.items():
        if serial < lock.registry.serial:
            raise RollbackError(
                f"{path} has serial {serial}, {place} locks serial {lock.registry.serial}: refused as a rollback; use "
                "the locked registry or a newer one, or remove the lock file to go back on purpose"
            )


def _given(values: Mapping[str, T | None]) -> dict[str, T]:
    return {source: value for source, value in values.items() if value is not None}
