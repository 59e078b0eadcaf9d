"""`chord humming-path`: where the stand-in for the package humming lies."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("humming-path")(humming_path)


def humming_path() -> None:
    """Print the folder that stands in for humming: PYTHONPATH=$(chord humming-path) vllm serve ... (docs/vllm.md)."""
    from chord.integrations.humming import ROOT

    typer.echo(ROOT)
