"""The NVRTC options that a table or the toolchain may name: none that could reach outside the closure."""

from __future__ import annotations

from collections.abc import Iterable

ALLOWED = (
    "--device-as-default-execution-space",
    "--diag-suppress=",
    "--dopt=",
    "--extra-device-vectorization",
    "--fmad=",
    "--ftz=",
    "--gpu-architecture=sm_",
    "--maxrregcount=",
    "--no-cache",
    "--no-source-include",
    "--prec-div=",
    "--prec-sqrt=",
    "--ptxas-options=",
    "--restrict",
    "--split-compile=1",
    "--std=",
)
"""Long spellings; one that ends in `=` or `_` is followed by a value."""

REQUIRED = ("--no-cache", "--no-source-include")
"""Without these NVRTC reads the working directory or the driver's cache."""


def refused(options: Iterable[str]) -> list[str]:
    """The options that are not allowed, or that are not one word in their long spelling."""
    return [option for option in options if not any(_matches(option, allowed) for allowed in ALLOWED)]


def _matches(option: str, allowed: str) -> bool:
    if allowed.endswith(("=", "_")):
        return option.startswith(allowed) and len(option) > len(allowed) and not any(c.isspace() for c in option)
    return option == allowed
