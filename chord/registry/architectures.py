"""Architectures as data: their exact names, and which GPU takes which. Nothing is guessed or rounded.

An "a" cubin runs on its own compute capability alone, so each capability has one architecture or none.
"""

from __future__ import annotations

from collections.abc import Iterable

from chord.errors import UnsupportedDeviceError

BY_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability (major, minor) of a device, and the only architecture whose cubins it gets."""

KNOWN = tuple(BY_CAPABILITY.values())


def ordered(names: Iterable[str]) -> list[str]:
    """Sorted by number: sm_90a before sm_100a."""
    return sorted(names, key=lambda name: (len(name), name))


def of_capability(major: int, minor: int, device: str = "this GPU") -> str:
    """The architecture of a device. Raises UnsupportedDeviceError for any capability that is not in the table."""
    arch = BY_CAPABILITY.get((major, minor))
    if arch is None:
        supported = ", ".join(f"{a}.{b} ({name})" for (a, b), name in BY_CAPABILITY.items())
        raise UnsupportedDeviceError(f"{device} is {major}.{minor}, not supported; supported are {supported}")
    return arch
