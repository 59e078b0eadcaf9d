"""The NVRTC options that a table or the toolchain may name: none that could reach outside the closure."""

from __future__ import annotations

import re
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
    "--ptxas-options=--allow-expensive-optimizations=",
    "--ptxas-options=--opt-level=",
    "--ptxas-options=--register-usage-level=",
    "--ptxas-options=--verbose",
    "--ptxas-options=--warn-on-spills",
    "--restrict",
    "--split-compile=1",
    "--std=",
)
"""Long spellings; one that ends in `=` or `_` is followed by a value.

Of ptxas only what is listed: it has options that read a file (--options-file) or write paths (--generate-line-info).
"""

_VALUE = re.compile(r"\w[\w+]*")
"""One word, as in c++17: a comma would begin a further option of ptxas."""

REQUIRED = ("--no-cache", "--no-source-include")
"""Without these NVRTC reads the working directory or the driver's cache."""


def refused(options: Iterable[str]) -> list[str]:
    """The options that are not allowed, or that are not one word in their long spelling."""
    return [option for option in options if not any(_matches(option, allowed) for allowed in ALLOWED)]


def _matches(option: str, allowed: str) -> bool:
    if allowed.endswith(("=", "_")):
        return option.startswith(allowed) and _VALUE.fullmatch(option, len(allowed)) is not None
    return option == allowed
