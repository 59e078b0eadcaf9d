"""The CHORD_ variables: one table of those that exist, read in one place.

A known variable is honoured or refused, an unknown one is warned about once per process.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chord.errors import SettingsError

PREFIX = "CHORD_"
KNOWN = {
    "CHORD_EP_ROWS": "indexed (default) or contiguous: how vLLM's plugin finds the rows of expert-parallel experts",
    "CHORD_HUMMING": "0 or 1: vLLM's plugin puts chord's stand-in for the package `humming` first on the import path",
    "CHORD_REGISTRY": "folder that holds manifest.json and the cubin store, instead of the packaged registry",
    "CHORD_PIN": "SHA-256 digest that the manifest must have, 64 lower-case hex digits",
    "CHORD_LOCK": "lock file (`chord lock`) that the registry must agree with",
    "CHORD_KEY": "file of Ed25519 public keys (PEM), one of which must have signed the manifest",
    "CHORD_RECEIPTS": "folder of receipts (`chord qualify`) that count beside those in registry/receipts",
    "CHORD_REQUIRE_RECEIPT": "0 or 1: load no cubin that has no receipt of a GPU on which its checks passed",
    "CHORD_SM90_DECODE": "0 or 1: a W4A16 profile's name on an H200, and nothing else: one layout serves both phases",
    "CHORD_USE_GROUPED": "0 or 1: a W4A16 profile's name on an H200, and nothing else: one layout serves all operators",
}
WITHOUT_EFFECT = ("CHORD_SM90_DECODE", "CHORD_USE_GROUPED")
"""Switches between packings elsewhere. There is one packing here, so that they select no kernel."""

_warned: set[str] = set()


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; None where it says nothing."""

    registry: Path | None = None
    pin: str | None = None
    lock: Path | None = None
    key: Path | None = None
    receipts: Path | None = None
    require_receipt: bool = False
    sm90_decode: bool | None = None
    use_grouped: bool | None = None
    humming: bool | None = None
    ep_rows: str = "indexed"


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the environment. Raises SettingsError for a known variable whose value cannot be honoured."""
    _warn_of_unknown(environ)
    pin = environ.get("CHORD_PIN")
    return Settings(
        registry=_path(environ, "CHORD_REGISTRY", "a folder that holds manifest.json"),
        pin=None if pin is None else checked_pin(pin, "CHORD_PIN"),
        lock=_path(environ, "CHORD_LOCK", "a file that `chord lock` wrote"),
        key=_path(environ, "CHORD_KEY", "a PEM file of public keys"),
        receipts=_path(environ, "CHORD_RECEIPTS", "a folder of receipts"),
        require_receipt=_switch(environ, "CHORD_REQUIRE_RECEIPT") or False,
        sm90_decode=_label(environ, "CHORD_SM90_DECODE"),
        use_grouped=_label(environ, "CHORD_USE_GROUPED"),
        humming=_switch(environ, "CHORD_HUMMING"),
        ep_rows=_choice(environ, "CHORD_EP_ROWS", ("indexed", "contiguous")),
    )


def checked_pin(pin: str, source: str) -> str:
    """`pin` if it is a digest. Raises SettingsError naming `source` otherwise."""
    if not isinstance(pin, str) or not re.fullmatch("[0-9a-f]{64}", pin):
        length = f", got {len(pin)} characters" if isinstance(pin, str) else ""
        raise SettingsError(
            f"{source} {pin!r} is not a digest: expected the manifest's SHA-256 as 64 lower-case hex digits{length}"
        )
    return pin


def _path(environ: Mapping[str, str], name: str, expected: str) -> Path | None:
    value = environ.get(name)
    if value is not None and not value.strip():
        raise SettingsError(f"{name} is empty: expected {expected}; set one or unset it")
    return None if value is None else Path(value)


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    """A variable that is 0 or 1."""
    value = environ.get(name)
    if value not in (None, "0", "1"):
        raise SettingsError(f"{name} is {value!r}: expected 0 or 1; set one or unset it")
    return None if value is None else value == "1"


def _label(environ: Mapping[str, str], name: str) -> bool | None:
    """A switch that has no effect on kernels, which is said once per process."""
    value = _switch(environ, name)
    if value is not None and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name}={value:d} selects no kernel: one packed layout serves prefill, decode and every operator. It only "
            "chooses the name of a W4A16Experts profile",
            stacklevel=4,
        )
    return value


def _choice(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """One of the allowed words, the first of them by default."""
    value = environ.get(name, allowed[0])
    if value not in allowed:
        raise SettingsError(f"{name} is {value!r}: expected {' or '.join(allowed)}; set one or unset it")
    return value


def unknown(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the variables that start like ours and are not, sorted."""
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in KNOWN)


def advice(name: str) -> str:
    """What may be meant by an unknown name: the known one that it resembles, else all of them."""
    words = [known.removeprefix(PREFIX) for known in KNOWN]  # the prefix alone would make every name resemble one
    near = difflib.get_close_matches(name.removeprefix(PREFIX), words, n=1)
    return f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(sorted(KNOWN))}"


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    for name in unknown(environ):
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name} is not a variable that chord knows, and has no effect; {advice(name)}", stacklevel=4)
