"""Keys for tests of signatures; where securesystemslib is not installed, such a test is skipped and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from chord.registry import Registry, signature


def key_pair(folder: Path, name: str, curve: bool = False) -> tuple[Path, Path]:
    """(private, public) PEM files of an Ed25519 key; of an ECDSA one if `curve`."""
    pytest.importorskip("securesystemslib", reason="needs securesystemslib: pip install 'chord-registry[sign]'")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    private = ec.generate_private_key(ec.SECP256R1()) if curve else ed25519.Ed25519PrivateKey.generate()
    secret, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    pkcs8, info = serialization.PrivateFormat.PKCS8, serialization.PublicFormat.SubjectPublicKeyInfo
    secret.write_bytes(private.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(pem, info))
    return secret, public


def sign(root: Path, secret: Path) -> str:
    """Sign the manifest in `root`, as it is; the key's id."""
    opened = Registry.open(root)
    return signature.sign(root / "manifest.json", signature.manifest_statement(opened.manifest, opened.digest), secret)
