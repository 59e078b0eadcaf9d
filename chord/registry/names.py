"""Program names: stable ids that say what a program is, made and parsed in one place.

A name is `<operator>.<arm>.<tag><value>...`, for example `fused_router.few.e896.k16.f32.t4.bm8`. Every constant
is a lower-case tag followed by a decimal number, so `f32` is the tag `f` with value 32. Hashes never enter a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_TOKEN = re.compile(r"([a-z]+)(0|[1-9][0-9]*)")


@dataclass(frozen=True, order=True)
class ProgramName:
    """Operator, arm and the constants that were filled into the arm's template, in the operator's axis order."""

    operator: str
    arm: str
    tokens: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for role, word in (("operator", self.operator), ("arm", self.arm)):
            if not _WORD.fullmatch(word):
                raise ValueError(f"{role} name {word!r}: expected lower-case words joined by single underscores")
        for tag, value in self.tokens:
            if not _TOKEN.fullmatch(f"{tag}{value}"):
                raise ValueError(f"constant {tag!r}={value!r}: expected a lower-case tag and a number >= 0")

    def __str__(self) -> str:
        return ".".join([self.operator, self.arm, *(f"{tag}{value}" for tag, value in self.tokens)])

    @property
    def symbol(self) -> str:
        """The C identifier of the program's first kernel; further kernels append `_<suffix>`."""
        return str(self).replace(".", "_")

    @classmethod
    def parse(cls, text: str) -> ProgramName:
        """Inverse of `str`. Raises ValueError that shows the offending part."""
        operator, *rest = text.split(".")
        if not rest:
            raise ValueError(f"program name {text!r}: expected <operator>.<arm>[.<tag><value>...]")
        tokens = []
        for part in rest[1:]:
            match = _TOKEN.fullmatch(part)
            if match is None:
                raise ValueError(f"program name {text!r}: {part!r} is not a tag followed by a number")
            tokens.append((match[1], int(match[2])))
        return cls(operator, rest[0], tuple(tokens))
