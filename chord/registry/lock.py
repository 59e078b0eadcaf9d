"""chord.lock: what a deployment was tried with, down to the last cubin. Whatever differs from it is refused.

A lock file that is named (argument, CHORD_LOCK) or lies beside the manifest is binding for `Registry.open`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from chord.errors import LockError, SettingsError
from chord.registry.decoding import RECORD_BYTES, canonical_json, decode_json, read_bounded, version_in
from chord.registry.schema import Manifest, RegistryInfo, Sha256, Toolchain

LOCK_NAME = "chord.lock"
LOCK_VERSION = 1


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of a lock file, version 1."""

    lock_version: Literal[1]
    registry: RegistryInfo
    manifest_sha256: Sha256
    toolchain: Toolchain
    cubins: dict[str, dict[str, Sha256]]
    """SHA-256 by program and architecture."""


def lock_of(manifest: Manifest, digest: str) -> Lock:
    """The lock of a manifest whose bytes have the SHA-256 `digest`."""
    return Lock(
        lock_version=1,
        registry=manifest.registry,
        manifest_sha256=digest,
        toolchain=manifest.toolchain,
        cubins={
            name: {arch: build.cubin_sha256 for arch, build in program.builds.items()}
            for operator in manifest.operators.values()
            for name, program in operator.programs.items()
        },
    )


def encode(lock: Lock) -> bytes:
    """The file's bytes, the same for equal locks."""
    return canonical_json(lock)


def decode(data: bytes, place: str) -> Lock:
    """Raises LockError naming `place` for anything but a lock file of this version."""
    version = version_in(data, "lock_version")
    if version not in (None, LOCK_VERSION):
        raise LockError(
            f"{place} has lock_version {version}, this chord reads {LOCK_VERSION}; install the chord that wrote it, or "
            "write one with `chord lock`"
        )
    try:
        return decode_json(data, Lock)
    except ValueError as error:
        raise LockError(f"{place} is not a lock file: {error}; write one with `chord lock`") from error


def read(path: Path, source: str) -> Lock:
    """`source` says where the path came from. Raises SettingsError when there is no such file, LockError."""
    try:
        data = read_bounded(path, RECORD_BYTES)
    except OSError as error:
        raise SettingsError(f"{source}: expected a lock file, cannot read {path} ({error.strerror})") from error
    return decode(data, f"{source}: {path}")


def require_agreement(lock: Lock, place: str, manifest: Manifest, digest: str) -> None:
    """A lock whose digest is the manifest's must say the same of everything else, too. Raises LockError."""
    differing = list(_differences(lock, lock_of(manifest, digest)))
    if differing:
        more = f", and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise LockError(
            f"{place} contradicts the manifest that it names: {', '.join(differing[:5])}{more}; it was edited: "
            "write it again with `chord lock`"
        )


def _differences(lock: Lock, expected: Lock) -> Iterator[str]:
    for field in ("registry", "manifest_sha256", "toolchain"):
        if getattr(lock, field) != getattr(expected, field):
            yield field
    for name in sorted({*lock.cubins, *expected.cubins}):
        if lock.cubins.get(name) != expected.cubins.get(name):
            yield f"cubins.{name}"
