"""Proof that a cubin is what the manifest names, in a fixed order and on the very bytes that the driver will get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chord.errors import MissingCubinError, VerificationError
from chord.registry import cubin
from chord.registry.schema import Arg, Arm, Manifest, Program
from chord.registry.store import Store

_PARAMETER_BYTES = {"i32": 4, "f32": 4, "i64": 8}
_ADDRESS_BYTES = 8
"""Size of a buffer argument."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a store."""

    kind: Literal["missing", "mismatch", "unlisted"]
    path: Path
    message: str
    program: str | None = None
    """None for an unlisted file."""
    arch: str | None = None


@dataclass(frozen=True)
class Report:
    """What `verify_all` found. `checked` counts the cubins that the manifest names."""

    checked: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def count(self, kind: str) -> int:
        return sum(finding.kind == kind for finding in self.findings)


def argument_bytes(args: Iterable[Arg]) -> tuple[int, ...]:
    """Size of each argument, as a kernel that takes them declares it."""
    return tuple(_PARAMETER_BYTES[arg.type] if arg.kind == "parameter" else _ADDRESS_BYTES for arg in args)


def verified_bytes(store: Store, name: str, program: Program, arm: Arm, arch: str) -> bytes:
    """The cubin of a program for one of its architectures, proven.

    1. size and 2. SHA-256 are the manifest's; 3. it is a sound CUDA ELF; 4. its target is `arch`; 5. it has the
    program's kernels, with the arm's arguments. Raises VerificationError naming the file, what was expected and what
    was found.
    """
    build = program.builds[arch]
    place = f"{name} for {arch}"
    path = store.path_of(build.cubin_sha256)
    try:
        data = store.read_verified(build.cubin_sha256, build.size_bytes)  # 1, 2
        info = cubin.parse(data)  # 3
    except VerificationError as error:
        located = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise type(error)(f"{place}: {located}") from error
    if info.arch != arch:  # 4
        raise VerificationError(
            f"{place}: {path}: expected a cubin for {arch}, found one for {info.arch}, although size and hash are the "
            "manifest's: the manifest was not made from these sources; rebuild it with `chord build`"
        )
    expected = argument_bytes(arm.args)
    for kernel in program.kernels:  # 5
        found = info.kernels.get(kernel.symbol)
        if found is None:
            raise VerificationError(
                f"{place}: {path}: expected kernel {kernel.symbol}, found {', '.join(info.kernels) or 'none'}"
            )
        if found.parameter_bytes != expected:
            raise VerificationError(
                f"{place}: {path}: expected {kernel.symbol} to take {len(expected)} arguments of {expected} bytes "
                f"({', '.join(arg.name for arg in arm.args)}), found {len(found.parameter_bytes)} of "
                f"{found.parameter_bytes} bytes"
            )
    return data


def verify_all(manifest: Manifest, store: Store) -> Report:
    """Check every cubin that the manifest names, and that the store holds nothing else."""
    checked = sum(len(p.builds) for operator in manifest.operators.values() for p in operator.programs.values())
    strangers = (
        Finding("unlisted", path, f"{path}: the manifest does not name it; remove it with `chord build`")
        for path in store.unlisted(manifest)
    )
    return Report(checked, (*_failures(manifest, store), *strangers))


def _failures(manifest: Manifest, store: Store) -> Iterator[Finding]:
    for operator in manifest.operators.values():
        for name, program in sorted(operator.programs.items()):
            for arch in program.architectures:
                try:
                    verified_bytes(store, name, program, operator.arms[program.arm], arch)
                except VerificationError as error:
                    kind: Literal["missing", "mismatch"]
                    kind = "missing" if isinstance(error, MissingCubinError) else "mismatch"
                    path = store.path_of(program.builds[arch].cubin_sha256)
                    yield Finding(kind, path, str(error), name, arch)
