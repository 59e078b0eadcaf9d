"""What every command shares: tables for people, one JSON document for scripts, errors in one place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def console() -> Console:
    """Standard output, looked up at every call so that it can be redirected; wide where no terminal sets a width.

    Text is shown as it is: brackets in a path or in a manifest's words are no markup.
    """
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False)


def errors() -> Console:
    """Standard error: progress and failures, so that standard output holds results alone."""
    return Console(stderr=True, markup=False)


def fail(error: BaseException | str) -> None:
    """Print an error without markup, so that brackets in its text survive."""
    errors().print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What is missing and how to install it; None when it belongs to no extra, and the error is a fault of ours."""
    extra = _EXTRAS.get(error.name or "")
    return extra and f"{error.name}: pip install 'chord-registry[{extra}]'"


def print_json(document: Any) -> None:  # noqa: ANN401 - whatever msgspec can encode
    """One document, sorted keys, two spaces of indent."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=2) + b"\n")
    sys.stdout.flush()


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table whose title and cells are shown as they are: brackets in them are no markup."""
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def _cell(value: object) -> Text:
    return Text("" if value is None else str(value))
