"""The pinned compiler: what build/toolchain.toml says, and the libraries on this machine that are exactly that.

The libraries are those of the pinned distribution and no others, wherever else an NVRTC may be installed; each is
hashed before anything loads it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from chord.build import tables
from chord.errors import DamagedCompilerError, TableError, ToolchainError
from chord.registry.schema import Positive, Sha256

INSTALL = "pip install 'chord-registry[build]'"

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Other names of the same machines."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class CompilerPin(_Strict, frozen=True, kw_only=True):
    """Which compiler, from which distribution, with which options on every architecture."""

    name: Literal["nvrtc"]
    version: str
    distribution: str
    options: tuple[str, ...]


class ArchitecturePin(_Strict, frozen=True, kw_only=True):
    """What is particular to one architecture."""

    options: tuple[str, ...]
    min_driver: Positive
    """Least CUDA driver API version, as cuDriverGetVersion reports it, that loads this architecture's cubins."""
    max_shared_bytes: Positive
    """Static plus dynamic shared memory that one block can have."""


class ToolchainPin(_Strict, frozen=True, kw_only=True):
    """build/toolchain.toml."""

    schema: Literal[1]
    compiler: CompilerPin
    libraries: dict[str, dict[str, Sha256]]
    """By platform (linux-x86_64), the SHA-256 of each library file."""
    architectures: Annotated[dict[str, ArchitecturePin], msgspec.Meta(min_length=1)]

    @property
    def identity(self) -> str:
        """What goes into every closure: the same on every platform, since they give the same cubins."""
        return f"{self.compiler.name} {self.compiler.version}"

    def options(self, arch: str) -> tuple[str, ...]:
        """All options of an architecture, in order, without an arm's own flags."""
        return self.architectures[arch].options + self.compiler.options

    def require_architecture(self, arch: str) -> None:
        """Raise ToolchainError unless `arch` is the exact name of a pinned architecture."""
        if arch not in self.architectures:
            raise ToolchainError(
                f"architecture {arch!r} is not known: expected one of {', '.join(self.architectures)}; "
                "names are matched exactly"
            )


@dataclass(frozen=True)
class Libraries:
    """Checked library files, not loaded yet."""

    nvrtc: Path
    builtins: Path


def load(path: Path, shown_as: str | None = None) -> ToolchainPin:
    """Read the pin. Raises TableError."""
    pin = tables.load_struct(path, ToolchainPin, shown_as)
    shown = shown_as or str(path)
    for system, files in pin.libraries.items():
        if sum(name.startswith("libnvrtc.so") for name in files) != 1 or len(files) != 2:
            raise TableError(f"{shown}: libraries.{system}: expected libnvrtc.so.* and libnvrtc-builtins.so.*")
    return pin


def this_platform() -> str:
    """The key of this machine's libraries: linux-x86_64, linux-aarch64."""
    machine = platform.machine().lower()
    return f"{sys.platform}-{_MACHINES.get(machine, machine)}"


def find(pin: ToolchainPin) -> Libraries:
    """The pinned libraries on this machine.

    Raises ToolchainError (DamagedCompilerError for files that are not the pinned ones): what was found instead, and
    what to install.
    """
    system = this_platform()
    if system not in pin.libraries:
        raise ToolchainError(
            f"{pin.identity} is pinned for {', '.join(pin.libraries)}, this machine is {system}: "
            "build on one of those, the cubins are the same"
        )
    distribution = _distribution(pin)
    found = {name: _checked(pin, distribution, name, digest) for name, digest in pin.libraries[system].items()}
    nvrtc = next(path for name, path in found.items() if name.startswith("libnvrtc.so"))
    builtins = next(path for path in found.values() if path != nvrtc)
    return Libraries(nvrtc, builtins)


def _distribution(pin: ToolchainPin) -> metadata.Distribution:
    name, version = pin.compiler.distribution, pin.compiler.version
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        others = _other_compilers(name)
        raise ToolchainError(
            f"the pinned compiler {pin.identity} ({name}=={version}) is not installed: {INSTALL}"
            + (f"; found and refused: {', '.join(others)}" if others else "")
        ) from None
    if distribution.version != version:
        raise ToolchainError(
            f"compiler refused: {name} {distribution.version} is installed, the pin is {version}: {INSTALL}"
        )
    return distribution


def _other_compilers(name: str) -> list[str]:
    """Installed NVRTC distributions other than the pinned one, for the message."""
    found = []
    for distribution in metadata.distributions():
        other = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if other.startswith("nvidia-cuda-nvrtc") and other != name:
            found.append(f"{other} {distribution.version}")
    return sorted(set(found))


def _checked(pin: ToolchainPin, distribution: metadata.Distribution, name: str, digest: str) -> Path:
    """The file called `name` in the distribution, if its bytes are the pinned ones."""
    listed = [file for file in distribution.files or () if file.name == name]
    if len(listed) != 1:
        raise DamagedCompilerError(
            f"{pin.compiler.distribution} {distribution.version}: expected one file {name}, found {len(listed)}; "
            f"reinstall it: {INSTALL}"
        )
    path = Path(str(listed[0].locate()))
    try:
        with path.open("rb") as file:
            found = hashlib.sha256()
            while block := file.read(1 << 20):
                found.update(block)
    except OSError as error:
        raise DamagedCompilerError(
            f"{path}: expected the pinned library, got {error.strerror}; reinstall it: {INSTALL}"
        ) from error
    if found.hexdigest() != digest:
        raise DamagedCompilerError(
            f"{path}: expected SHA-256 {digest} ({pin.identity}, {this_platform()}), got {found.hexdigest()}; "
            f"not loaded. Reinstall {pin.compiler.distribution}=={pin.compiler.version}"
        )
    return path
