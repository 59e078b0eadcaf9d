"""`chord lock | sign`: what a deployment is held to, and who vouches for it. Neither needs a GPU or torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from chord import _settings
from chord.cli._output import Json, RegistryPath, console, open_registry, print_json
from chord.errors import LockError, RollbackError, VerificationError
from chord.registry import Registry, signature
from chord.registry import lock as lock_file
from chord.registry import receipts as receipt_files
from chord.registry.facade import MANIFEST_NAME
from chord.registry.files import write_atomically
from chord.registry.lock import Lock


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("lock")(lock)
    app.command("sign")(sign)


def lock(
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; default: CHORD_LOCK, else chord.lock here.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 unless the file is the registry's lock.")
    ] = False,
    registry: RegistryPath = None,
    json: Json = False,
) -> None:
    """Verify the registry and write down what it is: version, serial, manifest, toolchain and every cubin.

    A process with CHORD_LOCK set to that file (or with the file beside manifest.json) opens nothing else. A registry
    with a lower serial than the file's is refused as a rollback.
    """
    required = _settings.read().lock
    path = out or required or Path(lock_file.LOCK_NAME)
    opened = open_registry(registry, relock=True)
    _require_right(opened, "not locked")
    made = lock_file.lock_of(opened.manifest, opened.digest)
    binding = {path, required or path, opened.root / lock_file.LOCK_NAME}  # whoever opens the registry heeds these
    before = {file: _locked_before(file, opened) for file in binding}[path]
    if not check:
        write_atomically(path, lock_file.encode(made))
    elif before is None:
        raise LockError(f"{path}: expected a lock file, found none; write it with `chord lock`")
    elif before != made:
        raise LockError(
            f"{path} is not the lock of {opened.root}: it names manifest {before.manifest_sha256}, there lies "
            f"{opened.digest}; write it again with `chord lock`"
        )
    cubins = sum(len(builds) for builds in made.cubins.values())
    if json:
        document = {"path": str(path), "manifest_sha256": opened.digest, "serial": made.registry.serial}
        print_json({**document, "cubins": cubins})
    else:
        what = f"{cubins} cubins of registry {made.registry.version}, serial {made.registry.serial}"
        console().print(f"{path}: {what}, manifest {opened.digest}", highlight=False, soft_wrap=True)


def _locked_before(path: Path, opened: Registry) -> Lock | None:
    """The lock file that there is already; None where there is none. Raises RollbackError if it locks a newer one."""
    if not os.path.lexists(path):
        return None
    serial = opened.manifest.registry.serial
    try:
        before = lock_file.read(path, "chord lock")
    except LockError as error:
        raise LockError(f"{error}, and move that file away first: what is none is not written over") from error
    if serial < before.registry.serial:
        raise RollbackError(
            f"{opened.root} has serial {serial}, {path} locks serial {before.registry.serial}: refused as a rollback; "
            "remove the file to go back on purpose"
        )
    return before


def sign(
    key: Annotated[
        Path, typer.Option("--key", help="Ed25519 private key, PEM (`openssl genpkey -algorithm ed25519`).")
    ],
    receipt: Annotated[
        list[Path] | None, typer.Option("--receipt", help="Sign this receipt instead of the manifest; repeatable.")
    ] = None,
    registry: RegistryPath = None,
    json: Json = False,
) -> None:
    """Sign the manifest (or receipts): an in-toto statement in a DSSE envelope, in a file beside it.

    The statement of the manifest says the SHA-256 of every template and header, the compiler's version and its options,
    so that others can build it again and compare. Nothing is sent anywhere. With CHORD_KEY set the key must be one of
    those.
    """
    signature.check_signer(key, _settings.read().key)
    if receipt:
        signed = {path: receipt_files.sign(path, key) for path in receipt}
    else:
        opened = open_registry(registry, resign=True)
        path = opened.root / MANIFEST_NAME
        signed = {path: _sign_manifest(opened, path, key)}
    rows = [{"path": str(signature.envelope_path(path)), "keyid": keyid} for path, keyid in signed.items()]
    if json:
        print_json(rows)
        return
    for row in rows:
        console().print(f"{row['path']}: signed with key {row['keyid']}", highlight=False, soft_wrap=True)


def _sign_manifest(opened: Registry, path: Path, key: Path) -> str:
    _require_right(opened, "not signed")
    return signature.sign(path, signature.manifest_statement(opened.manifest, opened.digest), key)


def _require_right(opened: Registry, otherwise: str) -> None:
    """Only what verifies is vouched for. Raises VerificationError."""
    report = opened.verify()
    if not report.ok:
        raise VerificationError(
            f"{opened.root}: {len(report.findings)} cubins are not right: {otherwise}; `chord verify` lists them"
        )
