"""The closure of a cubin: everything that the compiler reads to make it, and the hash of that.

The hash is over a text of one item a line, so that anybody can compute it again:

    chord closure 1
    compiler nvrtc 12.9.86
    option --gpu-architecture=sm_90a        (each option, in order)
    source fused_router.solo.e896.k16.f32.t1.bm8.cu <SHA-256 of the rendered source>
    header fused_router/score.cuh <SHA-256>  (each header, sorted by path)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chord.build.scan import ClosureError, Include, scan

HEADER_ENDING = ".cuh"


@dataclass(frozen=True)
class Closure:
    """What NVRTC is given, complete: it reads no file beside these."""

    name: str
    """NVRTC's name for the source. It is part of mangled names in anonymous namespaces, hence of the hash."""
    source: str
    headers: Mapping[str, str]
    """Text by path relative to templates/include."""
    options: tuple[str, ...]
    compiler: str

    @cached_property
    def sha256(self) -> str:
        """64 lower-case hex digits."""
        lines = ["chord closure 1", f"compiler {self.compiler}"]
        lines += [f"option {option}" for option in self.options]
        lines.append(f"source {self.name} {sha256_text(self.source)}")
        lines += [f"header {path} {sha256_text(text)}" for path, text in sorted(self.headers.items())]
        return sha256_text("\n".join(lines) + "\n")


class Headers:
    """The headers under templates/include, each read and scanned once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[str, tuple[Include, ...]]] = {}

    def needed_by(self, source: str, file: str) -> dict[str, str]:
        """Text of every header that `source` reaches, by path, sorted. `file` names it in a ClosureError."""
        reached: dict[str, str] = {}
        open_ends = [(include, file) for include in scan(source, file)]
        while open_ends:
            include, user = open_ends.pop()
            if include.header in reached:
                continue
            text, includes = self._read(include, user)
            reached[include.header] = text
            open_ends += [(further, f"templates/include/{include.header}") for further in includes]
        return dict(sorted(reached.items()))

    def _read(self, include: Include, user: str) -> tuple[str, tuple[Include, ...]]:
        known = self._known.get(include.header)
        if known is None:
            path = self._folder / include.header
            if not path.is_file():
                raise ClosureError(
                    f"{user}:{include.line}: {include.header!r} is not under templates/include: headers come from "
                    "there alone, toolkit and system headers are not used"
                )
            target = path.resolve()
            if not target.is_relative_to(self._folder.resolve()):
                raise ClosureError(
                    f"{user}:{include.line}: {include.header!r} is a link out of templates/include, to {target}: "
                    "headers come from there alone"
                )
            if path.suffix != HEADER_ENDING:
                raise ClosureError(
                    f"{user}:{include.line}: {include.header!r}: expected a name that ends in {HEADER_ENDING}: "
                    "no other header is recorded and packaged"
                )
            text = read_source(path)
            known = self._known[include.header] = (text, scan(text, f"templates/include/{include.header}"))
        return known


def read_source(path: Path) -> str:
    """A source file's text with its newlines as they are, so that its hash is that of the file. Raises ClosureError."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClosureError(f"{path}: expected UTF-8: {error}") from error


def sha256_text(text: str) -> str:
    """Digest of the text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
