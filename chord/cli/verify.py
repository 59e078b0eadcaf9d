"""`chord verify`: prove that the store holds exactly what the manifest names, and on demand that sources give it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chord.cli._output import Json, RegistryPath, console, one_line, open_registry, print_json
from chord.cli.build import Jobs, as_selection, as_tree, run_check


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild", help="Compile every cubin again from the sources beside the manifest and compare the bytes."
        ),
    ] = False,
    pin: Annotated[str | None, typer.Option(help="SHA-256 that manifest.json must have.")] = None,
    lock: Annotated[Path | None, typer.Option(help="Lock file that the registry must agree with.")] = None,
    key: Annotated[
        Path | None, typer.Option(help="Ed25519 public keys (PEM), one of which must have signed manifest.json.")
    ] = None,
    registry: RegistryPath = None,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Hash every cubin and read its architecture and kernels; exit 1 if anything is missing, different or unlisted."""
    opened = open_registry(registry, pin, lock=lock, key=key)
    report = opened.verify()
    counts = {kind: report.count(kind) for kind in ("missing", "mismatch", "unlisted")}
    if json:
        findings = [
            {"kind": f.kind, "program": f.program, "arch": f.arch, "message": f.message} for f in report.findings
        ]
        document = {"checked": report.checked, **counts, "findings": findings, "manifest_sha256": opened.digest}
        document["signed_by"] = opened.signed_by
        if not rebuild:
            print_json(document)
    else:
        for finding in report.findings:
            text = one_line(f"{finding.kind}: {finding.message}")
            console().print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        console().print(
            f"{report.checked} cubins checked in {opened.store.root}: {summary}", highlight=False, soft_wrap=True
        )
        console().print(f"manifest {opened.digest} (from {opened.source})", highlight=False, soft_wrap=True)
        if opened.signed_by:
            console().print(f"signed with key {opened.signed_by}", highlight=False, soft_wrap=True)
    if not report.ok:
        if json and rebuild:
            print_json(document)
        raise typer.Exit(1)
    if rebuild:
        run_check(
            as_selection(None, None), jobs, json, tree=as_tree(opened.root), fresh=True, said=document if json else None
        )
