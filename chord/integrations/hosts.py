"""The frameworks that chord plugs into, and the releases of them that it was tried with."""

from __future__ import annotations

import re
from importlib import metadata
from typing import NamedTuple

Release = tuple[int, ...]


class Host(NamedTuple):
    """A framework: its distribution, the first release that is served and the first that is not, and a way out."""

    distribution: str
    first: Release
    end: Release
    instead: str


VLLM = Host(
    "vllm",
    (0, 32),
    (0, 34),
    "serve without chord (leave --quantization chord out, unset CHORD_HUMMING, or set VLLM_PLUGINS to others), or "
    "install a release of chord that names this one",
)

SGLANG = Host(
    "sglang",
    (0, 5, 23),
    (0, 6),
    "serve without chord (leave --quantization chord out, or set SGLANG_PLUGINS to others), or install a release of "
    "chord that names this one",
)


def refusal(host: Host, version: str | None) -> str | None:
    """Why a release of a host that is there is not served, and what to do; None for one that is.

    version: as `installed` found it, None for a host that can be imported but was not installed as a distribution.
    """
    wanted = f"{_text(host.first)} <= version < {_text(host.end)}"
    if version is None:
        return (
            f"chord serves {host.distribution} {wanted}, found one whose version is unknown, since it has no package "
            f"metadata: install it as a package, or {host.instead}"
        )
    release = _release(version)
    if release is not None and host.first <= release < host.end:
        return None
    return f"chord serves {host.distribution} {wanted}, found {version}: {host.instead}"


def installed(host: Host) -> str | None:
    """The version that is installed, if any metadata tells it. Imports nothing of it."""
    try:
        return metadata.version(host.distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> Release | None:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if found is None else tuple(int(part or 0) for part in found.groups())


def _text(release: Release) -> str:
    return ".".join(map(str, release))
