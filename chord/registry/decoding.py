"""Reading files that others wrote: bounded in size and depth, and every refusal one of chord's errors."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

MANIFEST_BYTES = 64 << 20
"""Largest manifest that is read; the largest so far has 1 MB."""
RECORD_BYTES = 16 << 20
"""Largest lock file, receipt or signature that is read."""


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """A file's content. Raises OSError, its `strerror` in words, for what is no file or larger than `most_bytes`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block us
    except ValueError as error:  # a NUL in the name
        raise OSError(0, f"no name of a file: {error}", str(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "expected a file, found something else", str(path))
        if found.st_size > most_bytes:
            raise OSError(0, f"expected at most {most_bytes} bytes, found {found.st_size}", str(path))
        return file.read(found.st_size)


def decode_json(data: bytes, kind: type[T]) -> T:
    """JSON into a strict struct. Raises ValueError for anything else, however deeply nested."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


def version_in(data: bytes, field: str) -> int | None:
    """The number that a document says its form has; None where it says none that could be read."""
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get(field)
        return None if found is None else msgspec.json.decode(found, type=int)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def canonical_json(document: object) -> bytes:
    """UTF-8 JSON, keys sorted, two spaces of indent, one newline at the end: equal documents have equal bytes."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2) + b"\n"
