"""Reads CUDA source as the preprocessor would, to find every include, and refuses what would escape the closure.

Includes count wherever they stand, in branches of #if that are not taken and in block comments too: whichever way a
condition goes, what it leads to is hashed. What cannot be followed by reading (computed includes, pasted names) is
refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from chord.errors import CompileError


class ClosureError(CompileError):
    """Source that would make a cubin depend on something outside its closure; names file and line."""


@dataclass(frozen=True)
class Include:
    """One header that a source names, as written between the quotes, and where."""

    header: str
    line: int


_LEXEMES = re.compile(
    r"""
      (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^\s()\\]{0,16})\(.*?\)(?P=delimiter)")
    | (?P<literal>(?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    | [A-Za-z_$][\w$]* | \.?\d(?:[eEpP][+-]|'\w|[\w.])*
    | (?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))
    """,
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t\v\f]*(?:\#|%:|\?\?=)[ \t\v\f]*(?P<name>\w+)(?P<rest>[^\n]*)", re.MULTILINE)
_HEADER_NAME = re.compile(r"""\s*(?:"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>)""")
_HAS_INCLUDE = re.compile(r"""\s*\((?:\s*"(?P<quoted>[^"\n]+)"|\s*<(?P<angled>[^>\n]+)>)\s*\)""")
_ODD_NEWLINE = re.compile(r"\\[ \t\v\f]+\r?\n|\r(?!\n)")
_PASTE = re.compile(r"\#\#|%:%:|\?\?=\?\?=")

_REFUSED_DIRECTIVES = {"include_next", "import", "embed"}
_REFUSED_WORDS = {
    **dict.fromkeys(("__TIME__", "__DATE__", "__TIMESTAMP__"), "it would write the time of the build into the cubin"),
    **dict.fromkeys(
        ("__FILE__", "__FILE_NAME__", "__BASE_FILE__", "__builtin_FILE"), "it would write a path into the cubin"
    ),
    **dict.fromkeys(("__has_include_next", "__has_embed"), "its answer depends on files outside the closure"),
}


def scan(text: str, file: str) -> tuple[Include, ...]:
    """Every header that `text` names, in order of lines. Raises ClosureError."""
    _refuse_odd_newlines(text, file)
    spliced = _spliced(text)
    code = _without_comments(spliced)
    found = set(_has_includes(spliced, file))
    # Both with comments and without: whatever a compiler takes for a comment, no directive that it might see is missed.
    for view in (spliced, code):
        found.update(_includes(view, file))
    _refuse_words(spliced, file)
    _refuse_pasting(code, file)
    return tuple(sorted(found, key=lambda include: (include.line, include.header)))


def _includes(code: str, file: str) -> Iterator[Include]:
    for match in _DIRECTIVE.finditer(code):
        line = _line_at(code, match.start("name"))
        if match["name"] in _REFUSED_DIRECTIVES:
            raise ClosureError(
                f"{file}:{line}: #{match['name']} is refused: use #include of a file under templates/include"
            )
        if match["name"] == "include":
            yield Include(_header(match["rest"], file, line), line)


def _refuse_odd_newlines(text: str, file: str) -> None:
    """Where compilers disagree on what ends a line, a directive could be missed."""
    odd = _ODD_NEWLINE.search(text)
    if odd:
        raise ClosureError(
            f"{file}:{_line_at(text, odd.start())}: a backslash with blanks behind it, or a carriage return alone: "
            "expected lines that end in a newline"
        )


def _spliced(text: str) -> str:
    """Lines continued by a backslash joined; the newlines move to the end of the joined line, to keep line numbers."""
    lines, pending = [], 0
    held = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        if line.endswith("\\"):
            held += line[:-1]
            pending += 1
            continue
        lines.append(held + line + "\n" * pending)
        held, pending = "", 0
    return "\n".join([*lines, held] if held else lines)


def _without_comments(text: str) -> str:
    """Comments become a blank, raw strings an empty one; their newlines stay."""

    def replace(match: re.Match[str]) -> str:
        if match["comment"] is not None:
            return " " + "\n" * match["comment"].count("\n")
        if match["raw"] is not None:
            return '""' + "\n" * match["raw"].count("\n")
        return match[0]

    return _LEXEMES.sub(replace, text)


def _header(rest: str, file: str, line: int) -> str:
    match = _HEADER_NAME.match(_without_comments(rest))
    if match is None:
        raise ClosureError(f'{file}:{line}: #include{rest}: expected "path" or <path>; computed includes are refused')
    return _normal(match["quoted"] or match["angled"], file, line)


def _normal(header: str, file: str, line: int) -> str:
    if header.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", header):
        raise ClosureError(
            f"{file}:{line}: {header!r}: absolute includes are refused; write it relative to templates/include"
        )
    if "\\" in header or posixpath.normpath(header) != header or header.startswith(".."):
        raise ClosureError(
            f"{file}:{line}: {header!r}: expected a plain path relative to templates/include, without . or .. in it"
        )
    return header


def _has_includes(code: str, file: str) -> Iterator[Include]:
    """Headers that __has_include asks for: known ones belong to the closure, resolving refuses the others."""
    for match in re.finditer(r"\b__has_include\b", code):
        line = _line_at(code, match.start())
        asked = _HAS_INCLUDE.match(code, match.end())
        if asked is None:
            raise ClosureError(f'{file}:{line}: __has_include: expected ("path") or (<path>) right after it')
        yield Include(_normal(asked["quoted"] or asked["angled"], file, line), line)


def _refuse_words(code: str, file: str) -> None:
    """In comments and strings too: there is no need for them, and nothing to get wrong."""
    for match in re.finditer(r"\b__\w+", code):
        reason = _REFUSED_WORDS.get(match[0])
        if reason:
            raise ClosureError(f"{file}:{_line_at(code, match.start())}: {match[0]} is refused: {reason}")


def _refuse_pasting(code: str, file: str) -> None:
    bare = _LEXEMES.sub(lambda match: re.sub(r"[^\n]", " ", match[0]) if match["literal"] else match[0], code)
    pasted = _PASTE.search(bare)
    if pasted:
        raise ClosureError(
            f"{file}:{_line_at(code, pasted.start())}: {pasted[0]} is refused: a pasted name cannot be checked "
            "(it could spell __TIME__); let the template write the name"
        )


def _line_at(code: str, position: int) -> int:
    return code.count("\n", 0, position) + 1
