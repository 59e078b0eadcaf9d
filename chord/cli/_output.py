"""What every command shares: tables for people, one JSON document for scripts, errors in one place."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chord.errors import ReceiptError, VerificationError
from chord.registry import Registry

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
RegistryPath = Annotated[
    str | None,
    typer.Option(
        "--registry", help="Folder with manifest.json and cubins, instead of CHORD_REGISTRY or the package's."
    ),
]

_EXTRAS = {"distributed": "cluster", "jinja2": "build", "tomli": "build", "tomlkit": "dev", "torch": "torch"}
"""Optional dependencies, and the extra that brings each of them."""

_PIPE_WIDTH = 240
"""Columns of a table that goes to a file or a pipe: wide enough that names and hashes stay whole."""


def open_registry(
    path: str | None,
    pin: str | None = None,
    *,
    lock: Path | None = None,
    key: Path | None = None,
    relock: bool = False,
    resign: bool = False,
) -> Registry:
    """The registry that a command is about; messages call `path` by the option's name. Errors as Registry.open."""
    return Registry.open(path, pin, lock=lock, key=key, relock=relock, resign=resign, path_name="--registry")


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, those that turn the direction of text, and what stands for bytes that are no
UTF-8.
"""


def printable(text: str) -> str:
    """Text with escapes in place of what a terminal would obey or could not show.

    Names of files come from others: one could repaint what `chord verify` says of it, or end the command.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same for a message about a file that was found, which has no line breaks but those of the file's name."""
    return printable(text).replace("\n", "\\n")


class _Console(Console):
    """Prints text as it is, but for what is not printable."""

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - as rich has it
        super().print(*(printable(shown) if isinstance(shown, str) else shown for shown in objects), **options)


def console() -> Console:
    """Standard output, looked up at every call so that it can be redirected; wide where no terminal sets a width.

    Text is shown as it is: brackets in a path or in a manifest's words are no markup.
    """
    return _Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False)


def errors() -> Console:
    """Standard error: progress and failures, so that standard output holds results alone."""
    return _Console(stderr=True, markup=False)


def fail(error: BaseException | str) -> None:
    """Print an error without markup, so that brackets in its text survive."""
    found = isinstance(error, (ReceiptError, VerificationError))  # each about one file, which others may have named
    text = one_line(str(error)) if found else error
    errors().print(f"error: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What is missing and how to install it; None when it belongs to no extra, and the error is a fault of ours."""
    extra = _EXTRAS.get(error.name or "")
    return extra and f"{error.name}: pip install 'chord-registry[{extra}]'"


def print_json(document: Any) -> None:  # noqa: ANN401 - whatever msgspec can encode
    """One document, sorted keys, two spaces of indent."""
    try:
        data = msgspec.json.encode(document, order="sorted")
    except UnicodeEncodeError:  # a file's name that is no UTF-8
        data = msgspec.json.encode(_all_printable(msgspec.to_builtins(document)), order="sorted")
    sys.stdout.buffer.write(msgspec.json.format(data, indent=2) + b"\n")
    sys.stdout.flush()


def _all_printable(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict):
        return {_all_printable(key): _all_printable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_all_printable(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table whose title and cells are shown as they are: brackets in them are no markup."""
    table = Table(title=Text(printable(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def _cell(value: object) -> Text:
    return Text("" if value is None else printable(str(value)))
