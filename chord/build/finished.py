"""Finished cubins by closure: what makes builds incremental, and what a failed build leaves for the next one.

One file a cubin, `<closure>.<cubin's SHA-256>`, so that a listing says what there is and the name says what the bytes
must be. A file that is not what its name says counts as absent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from pathlib import Path

from chord.registry.files import TEMPORARY, write_atomically

_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})")


class Finished:
    """The folder, as it was when first asked, with what this process added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        self._known = {match[1]: match[2] for match in map(_NAME.fullmatch, sorted(names)) if match}

    def find(self, closure_sha256: str) -> bytes | None:
        """The cubin of a closure, if it is there and intact."""
        digest = self._known.get(closure_sha256)
        if digest is None:
            return None
        try:
            data = (self._folder / f"{closure_sha256}.{digest}").read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def add(self, closure_sha256: str, data: bytes) -> None:
        """Keep a cubin; an earlier one of the same closure goes."""
        digest = hashlib.sha256(data).hexdigest()
        write_atomically(self._folder / f"{closure_sha256}.{digest}", data)
        before = self._known.get(closure_sha256)
        if before not in (None, digest):
            (self._folder / f"{closure_sha256}.{before}").unlink(missing_ok=True)
        self._known[closure_sha256] = digest

    def prune(self, current: Container[str]) -> None:
        """Remove the cubins of closures that no table asks for any more, and what killed writers left behind."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if TEMPORARY.fullmatch(path.name) or (match and match[1] not in current):
                path.unlink(missing_ok=True)
