"""The manifest's bytes: one canonical form to write, strict reading with every cross-check, and the digest.

Canonical: UTF-8 JSON, keys sorted, two spaces of indent, one newline at the end.
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any

import msgspec

from chord.errors import ManifestError
from chord.registry.consistency import problems_of
from chord.registry.decoding import canonical_json, decode_json
from chord.registry.schema import SCHEMA_VERSION, Manifest

_SHOWN = 10
"""Contradictions that one error lists before it only counts the rest."""
_SEARCH_S = 2.0
"""Longest search for the entry that a message is about."""


class _Versioned(msgspec.Struct):
    """The one field that is read before anything else is believed."""

    schema_version: int


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes. `decode(encode(m), ...) == m`, and equal manifests have equal bytes."""
    return canonical_json(manifest)


def digest(data: bytes) -> str:
    """What a pin pins: the SHA-256 of a manifest's bytes as they lie on disk."""
    return hashlib.sha256(data).hexdigest()


def decode(data: bytes, source: str) -> Manifest:
    """Read a manifest; `source` names it in errors.

    Raises ManifestError for anything but a manifest of this schema version that agrees with itself.
    """
    try:
        version = decode_json(data, _Versioned).schema_version
    except ValueError as error:
        raise ManifestError(f"{source} is not a manifest: {error}; write one with `chord build`") from error
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"{source} has schema_version {version}, this chord reads {SCHEMA_VERSION}; "
            "install the chord that belongs to the manifest, or rebuild it with `chord build`"
        )
    try:
        manifest = decode_json(data, Manifest)
    except ValueError as error:
        raise ManifestError(f"{source}: {_located(data, str(error))}") from error
    problems = problems_of(manifest)
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        raise ManifestError(f"{source} contradicts itself; rebuild it with `chord build`:{listed}{more}")
    return manifest


def _located(data: bytes, message: str) -> str:
    """`message` with the keys that msgspec leaves out of its paths (`[...]`), so that it names the entry.

    In a huge file the search takes too long, and a key of the file may look like a path: then the message stays as it
    is.
    """
    problem, found, steps = message.rpartition(" - at `$")
    if not found:
        return message
    try:
        path = _path_of(decode_json(data, object), re.findall(r"\.\w+|\[\d+\]|\[\.\.\.\]", steps), message)
    except (ValueError, TypeError, LookupError, TimeoutError):  # the first: further behind, the file is no JSON at all
        return message
    return f"{problem} - at {path.lstrip('.')}"


def _path_of(raw: Any, steps: list[str], message: str) -> str:  # noqa: ANN401 - whatever JSON holds
    """The steps with every key. Raises TypeError or LookupError for steps that do not lead through `raw`.

    Each key is found by keeping one entry of the dictionary alone and looking whether the same complaint comes back.
    """
    deadline = time.monotonic() + _SEARCH_S
    parent, path = raw, ""
    for step in steps:
        if step != "[...]":
            key: str | int = step[1:] if step[0] == "." else int(step[1:-1])
        else:
            entries = dict(parent)
            for key, value in entries.items():
                parent.clear()
                parent[key] = value
                if _complaint(raw) == message:
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError
            else:
                raise LookupError(step)
        path += f".{key}" if isinstance(key, str) and step != "[...]" else f"[{key!r}]"
        if isinstance(parent, dict) and key not in parent:
            break
        parent = parent[key]
    return path


def _complaint(raw: object) -> str:
    try:
        msgspec.convert(raw, type=Manifest)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
