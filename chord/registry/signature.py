"""Signatures: an in-toto statement about a file, in a DSSE envelope beside it, signed with Ed25519. All of it offline.

The envelope of `manifest.json` is `manifest.json.dsse`. securesystemslib (extra `sign`) makes and checks signatures;
it is imported when a key is given, never before.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from chord.errors import SettingsError, SignatureError
from chord.registry.decoding import RECORD_BYTES, canonical_json, decode_json, read_bounded
from chord.registry.files import write_atomically
from chord.registry.schema import Manifest, Sha256

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner, SSlibKey

SUFFIX = ".dsse"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"

_PROJECT = "pkg:pypi/chord-registry"
_KEY_BYTES = 1 << 16
_PUBLIC = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)


class _Signature(msgspec.Struct, frozen=True, kw_only=True):
    keyid: str = ""
    sig: str


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """DSSE's JSON form. Unknown fields are legal in it."""

    payload: str
    payloadType: str  # noqa: N815 - DSSE's name
    signatures: tuple[_Signature, ...]


class _Digest(msgspec.Struct, frozen=True):
    sha256: Sha256


class _Subject(msgspec.Struct, frozen=True):
    digest: _Digest
    name: str = ""


class _Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of an in-toto statement; the predicate is for other readers."""

    type: str = msgspec.field(name="_type")
    subject: tuple[_Subject, ...]
    predicate_type: str = msgspec.field(name="predicateType")


def envelope_path(path: Path) -> Path:
    """Where the signatures of a file lie."""
    return path.with_name(path.name + SUFFIX)


def manifest_statement(manifest: Manifest, digest: str) -> dict[str, Any]:
    """SLSA provenance of a manifest: all that a third party needs to build it again and compare."""
    toolchain, info = manifest.toolchain, manifest.registry
    sources = [
        {"name": f"templates/{path}", "digest": {"sha256": sha256}} for path, sha256 in sorted(manifest.sources.items())
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "manifest.json", "digest": {"sha256": digest}}],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{_PROJECT}#chord/build",
                "externalParameters": {"version": info.version, "serial": info.serial},
                "internalParameters": {
                    "compiler": toolchain.compiler,
                    "compilerVersion": toolchain.version,
                    "compilerOptions": toolchain.options,
                },
                "resolvedDependencies": sources,
            },
            "runDetails": {"builder": {"id": f"{_PROJECT}@{info.version}"}},
        },
    }


def sign(path: Path, statement: dict[str, Any], key: Path) -> str:
    """Sign `statement`, whose first subject is the file `path`, and write the envelope beside that; the key's id.

    key: an Ed25519 private key, PEM (`openssl genpkey -algorithm ed25519`). Others' signatures of the same statement
    stay, those of an earlier one go. Raises SettingsError for a key that cannot be used.
    """
    signer = _signer(key)
    payload = canonical_json(statement)
    target = envelope_path(path)
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    if target.exists():
        try:
            before = _decode_envelope(read_bounded(target, RECORD_BYTES))
        except (ValueError, OSError):
            before = None
        if before is not None and before.payload == payload:
            envelope = before
    envelope.sign(signer)
    write_atomically(target, canonical_json(envelope.to_dict()))
    keyid: str = signer.public_key.keyid
    return keyid


def check_signer(key: Path, keys: Path | None) -> None:
    """Before anything is made that a private key is to sign: it can be used, and is one of the public `keys`, if any.

    keys: those that CHORD_KEY requires. Raises SettingsError, SignatureError.
    """
    made, source = _signer(key).public_key.keyid, "CHORD_KEY"
    if keys is None:
        return
    accepted = [public.keyid for public in _public_keys(keys, source)]
    if made not in accepted:
        raise SignatureError(
            f"--key: {key} has the id {made}, {source} accepts {', '.join(accepted)} alone, from {keys}: what it signs "
            "would be refused here; use another key, or add its public part to that file"
        )


def verify(path: Path, digest: str, predicate: str, keys: Path, source: str) -> str:
    """Check that one of the public keys in the file `keys` signed the file `path` with that SHA-256; the key's id.

    predicate: what kind of statement it must be. source: where `keys` came from. Raises SettingsError for keys that
    cannot be used, SignatureError.
    """
    accepted = _public_keys(keys, source)
    envelope = _read_envelope(path, source, keys)
    known = {key.keyid: key for key in accepted}
    common: list[str] = [keyid for keyid in envelope.signatures if keyid in known]
    if not common:
        theirs = ", ".join(envelope.signatures) or "none"
        raise SignatureError(
            f"{source}: {path} is signed by other keys than those in {keys}: expected one of {', '.join(known)}, "
            f"found {theirs}"
        )
    from securesystemslib.exceptions import UnverifiedSignatureError

    for keyid in common:
        try:
            known[keyid].verify_signature(envelope.signatures[keyid], envelope.pae())
        except UnverifiedSignatureError:
            continue
        _require_subject(envelope.payload, digest, predicate, f"{source}: {path}")
        return keyid
    raise SignatureError(
        f"{source}: {envelope_path(path)} has a wrong signature of {', '.join(common)}: "
        "the statement was changed after it was signed, or another key signed under this id"
    )


def _require_subject(payload: bytes, digest: str, predicate: str, place: str) -> None:
    """A statement must be one of in-toto, and its first subject the file that is at hand. Raises SignatureError."""
    try:
        statement = decode_json(payload, _Statement)
    except ValueError as error:
        raise SignatureError(f"{place}: what was signed is no in-toto statement: {error}") from error
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, predicate):
        raise SignatureError(
            f"{place}: expected a {STATEMENT_TYPE} with predicate {predicate}, what was signed is "
            f"{statement.type!r} with {statement.predicate_type!r}"
        )
    found = statement.subject[0].digest.sha256 if statement.subject else "no subject"
    if found != digest:
        raise SignatureError(
            f"{place} has SHA-256 {digest}, what was signed is {found}: it was changed after it was signed"
        )


def _read_envelope(path: Path, source: str, keys: Path) -> Envelope:
    target = envelope_path(path)
    try:
        return _decode_envelope(read_bounded(target, RECORD_BYTES))
    except FileNotFoundError:
        raise SignatureError(
            f"{source}: {path} is not signed: expected {target.name} beside it, with a signature by a key in {keys}"
        ) from None
    except OSError as error:
        raise SignatureError(f"{source}: cannot read {target} ({error.strerror})") from error
    except ValueError as error:
        raise SignatureError(f"{source}: {target} is not a DSSE envelope: {error}") from error


def _decode_envelope(data: bytes) -> Envelope:
    """Raises ValueError for anything but an envelope of an in-toto statement."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import Signature

    raw = decode_json(data, _Envelope)
    if raw.payloadType != PAYLOAD_TYPE:
        raise ValueError(f"expected the payload type {PAYLOAD_TYPE}, got {raw.payloadType!r}")
    try:
        payload = base64.b64decode(raw.payload, validate=True)
        found = {s.keyid: base64.b64decode(s.sig, validate=True).hex() for s in raw.signatures}
    except binascii.Error as error:
        raise ValueError(f"expected base64: {error}") from error
    if len(found) != len(raw.signatures):
        raise ValueError("expected one signature of each key")
    return Envelope(payload, raw.payloadType, {keyid: Signature(keyid, sig) for keyid, sig in found.items()})


def _public_keys(path: Path, source: str) -> Sequence[SSlibKey]:
    """Every public key of a PEM file. Raises SettingsError unless there are some, each of them Ed25519."""
    data = _read_key(path, source)
    serialization, signer, unsupported = _library(source)
    found = []
    for block in _PUBLIC.findall(data):
        try:
            key = signer.SSlibKey.from_crypto(serialization.load_pem_public_key(block))
        except (ValueError, unsupported) as error:
            raise SettingsError(f"{source}: {path} holds a key that cannot be read: {error}") from error
        if key.keytype != "ed25519":
            raise SettingsError(f"{source}: {path}: expected Ed25519 keys, got one of {key.keytype}")
        found.append(key)
    if not found:
        raise SettingsError(
            f"{source}: {path}: expected PEM public keys, found none; make one from a private key with "
            "`openssl pkey -pubout`"
        )
    return found


def _signer(path: Path) -> CryptoSigner:
    data = _read_key(path, "--key")
    serialization, signer, unsupported = _library("--key")
    try:
        private = serialization.load_pem_private_key(data, password=None)
        made: CryptoSigner = signer.CryptoSigner(private)
    except (ValueError, TypeError, unsupported) as error:
        raise SettingsError(
            f"--key: {path}: expected an Ed25519 private key in PEM, not encrypted (`openssl genpkey -algorithm "
            f"ed25519`): {error}"
        ) from error
    if made.public_key.keytype != "ed25519":
        raise SettingsError(f"--key: {path}: expected an Ed25519 key, got one of {made.public_key.keytype}")
    return made


def _read_key(path: Path, source: str) -> bytes:
    try:
        return read_bounded(path, _KEY_BYTES)
    except OSError as error:
        raise SettingsError(f"{source}: expected a PEM file, cannot read {path} ({error.strerror})") from error


def _library(source: str) -> tuple[Any, Any, type[Exception]]:
    """What reads keys, what makes signers of them, and the error about kinds of keys that neither knows."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from securesystemslib import signer
    except ImportError as error:
        raise SettingsError(
            f"{source}: signatures need {error.name}: pip install 'chord-registry[sign]'; nothing is trusted without it"
        ) from error
    return serialization, signer, UnsupportedAlgorithm
