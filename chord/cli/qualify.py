"""`chord qualify`: run the GPU checks on this machine and leave a receipt of what ran on which cubin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chord import _settings
from chord.cli._output import Json, console, print_json
from chord.cli.bench import require_gpu
from chord.errors import ChordError, SettingsError

if TYPE_CHECKING:
    from chord.checks.qualify import Verdict


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("qualify")(qualify)


def qualify(
    op: Annotated[
        list[str] | None, typer.Option("--op", help="Only this operator, for example fused_router; repeatable.")
    ] = None,
    only: Annotated[str, typer.Option("--only", help="Shell patterns of program names, separated by commas.")] = "*",
    tiny: Annotated[bool, typer.Option("--tiny", help="Inputs small enough for compute-sanitizer.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes at a time; the receipt is one.")] = 1,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", help="Folder for the receipt; default: registry/receipts beside manifest.json."),
    ] = None,
    no_receipt: Annotated[bool, typer.Option("--no-receipt", help="Write no receipt.")] = False,
    key: Annotated[Path | None, typer.Option("--key", help="Ed25519 private key (PEM) that signs the receipt.")] = None,
    json: Json = False,
) -> None:
    """Run the GPU checks of every program against the cubins of this registry, and write a receipt.

    The receipt says which cubins ran where, and whether they passed; `chord ls` and `chord coverage` show it, and
    CHORD_REQUIRE_RECEIPT=1 asks for it. It is kept up to date as programs are done: a run that is ended early leaves
    one that holds for what it has. Exit status 1 if any program failed.
    """
    if _settings.read().require_receipt:
        raise SettingsError("CHORD_REQUIRE_RECEIPT=1 lets nothing run that has no receipt yet: unset it to qualify")
    if no_receipt and (receipt or key):
        raise typer.BadParameter("--no-receipt contradicts --receipt and --key")
    require_gpu()
    import torch

    from chord.checks import receipts, shards
    from chord.checks.suites import qualify_all

    folder = None if no_receipt else receipts.folder(receipt)
    device = torch.cuda.current_device()
    wanted, show = receipts.patterns(op, only), (lambda verdict: None) if json else _print_verdict

    def check(progress: receipts.Progress) -> list[Verdict]:
        if jobs > 1:
            return shards.qualify_in_processes(device, jobs, tiny=tiny, only=wanted, progress=progress)
        return qualify_all(device, tiny=tiny, only=wanted, progress=progress)

    journal = None if folder is None else receipts.Journal(folder, device, tiny=tiny, key=key)
    verdicts = check(show) if journal is None else receipts.recorded(check, show, journal)
    if not verdicts:
        raise ChordError(
            f"--op {' '.join(op or ['(all)'])} and --only {only!r} match no program; `chord ls` lists them"
        )
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    if json:
        print_json(receipts.make(verdicts, device, tiny=tiny))
    else:
        console().print(f"{len(verdicts)} programs checked, {failed} failed")
        if journal is not None:
            console().print(f"receipt: {journal.path}", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _print_verdict(verdict: Verdict) -> None:
    state = "FAILED" if verdict.problems else "ok"
    what = f"{state:6} {verdict.program}, {verdict.cases} cases, {verdict.seconds:.1f} s"
    console().print(what, markup=False, highlight=False)
    for problem in verdict.problems[:5]:
        console().print(f"       {problem}", markup=False, highlight=False, style="red", soft_wrap=True)
