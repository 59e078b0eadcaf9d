"""The command `chord`. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import sys

import typer

from chord._version import __version__
from chord.cli import bench, build, doctor, inspect, integrations, qualify, trust, verify
from chord.cli._output import fail, missing_extra
from chord.errors import ChordError

app = typer.Typer(
    name="chord",
    help="A registry of ahead-of-time compiled, hash-verified GPU kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (build, inspect, verify, trust, doctor, bench, qualify, integrations):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line: exit status 0 for success, 1 for a failure or a difference, 2 for wrong usage.

    An interrupted build ends with 130.
    """
    try:
        app()
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        fail(f"this command needs {advice}")
        sys.exit(1)
    except (ChordError, ValueError, OSError, Warning) as error:  # a warning where PYTHONWARNINGS makes it an error
        fail(error)
        sys.exit(1)
