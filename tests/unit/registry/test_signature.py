"""Signatures: in-toto statements in DSSE envelopes, made and checked by securesystemslib, refused when in doubt."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
from unit.registry.samples import plain_manifest, publish

from chord.errors import SettingsError, SignatureError
from chord.registry import Registry, signature
from signing import key_pair, sign


@pytest.fixture
def keys(tmp_path):
    return key_pair(tmp_path, "ours")


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "registry"
    folder.mkdir()
    return publish(folder, plain_manifest())


@pytest.fixture
def signed(plain, keys):
    sign(plain, keys[0])
    return plain


def envelope(root):
    return json.loads((root / "manifest.json.dsse").read_text())


def replace(root, document):
    (root / "manifest.json.dsse").write_text(json.dumps(document))


def test_a_signed_registry_opens_with_its_key(signed, keys, monkeypatch):
    keyid = Registry.open(signed, key=keys[1]).signed_by
    assert keyid == envelope(signed)["signatures"][0]["keyid"]
    monkeypatch.setenv("CHORD_KEY", str(keys[1]))
    assert Registry.open(signed).signed_by == keyid
    monkeypatch.delenv("CHORD_KEY")
    assert Registry.open(signed).signed_by is None


def test_the_statement_says_what_a_rebuild_needs(signed):
    document = envelope(signed)
    assert document["payloadType"] == "application/vnd.in-toto+json"
    statement = json.loads(base64.b64decode(document["payload"]))
    opened = Registry.open(signed)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "manifest.json", "digest": {"sha256": opened.digest}}]
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    definition = statement["predicate"]["buildDefinition"]
    sources = {d["name"]: d["digest"]["sha256"] for d in definition["resolvedDependencies"]}
    assert sources == {f"templates/{path}": sha256 for path, sha256 in opened.manifest.sources.items()}
    toolchain = opened.manifest.toolchain
    assert definition["internalParameters"] == {
        "compiler": toolchain.compiler,
        "compilerVersion": toolchain.version,
        "compilerOptions": {arch: list(options) for arch, options in toolchain.options.items()},
    }


def test_an_unsigned_registry_is_refused(plain, keys, monkeypatch):
    with pytest.raises(SignatureError, match=r"key: .*manifest.json is not signed: expected manifest.json.dsse beside"):
        Registry.open(plain, key=keys[1])
    monkeypatch.setenv("CHORD_KEY", str(keys[1]))
    with pytest.raises(SignatureError, match=r"CHORD_KEY: .* is not signed"):
        Registry.open(plain)


def test_another_keys_signature_is_refused(signed, tmp_path):
    _, other = key_pair(tmp_path, "other")
    with pytest.raises(SignatureError, match=r"is signed by other keys than those in .*other.pub"):
        Registry.open(signed, key=other)


def test_every_required_key_counts(signed, keys, tmp_path, monkeypatch):
    secret, other = key_pair(tmp_path, "other")
    monkeypatch.setenv("CHORD_KEY", str(other))
    with pytest.raises(SignatureError, match=r"CHORD_KEY: .* signed by other keys"):
        Registry.open(signed, key=keys[1])
    monkeypatch.delenv("CHORD_KEY")
    sign(signed, secret)  # a second signature of the same statement is added
    monkeypatch.setenv("CHORD_KEY", str(other))
    assert len(envelope(signed)["signatures"]) == 2
    assert Registry.open(signed, key=keys[1]).signed_by


def test_a_file_of_several_keys_accepts_each(signed, keys, tmp_path):
    _, other = key_pair(tmp_path, "other")
    both = tmp_path / "both.pub"
    both.write_bytes(b"rotation:\n" + other.read_bytes() + keys[1].read_bytes())
    assert Registry.open(signed, key=both).signed_by


def test_a_changed_manifest_is_refused(signed, keys):
    path = signed / "manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(SignatureError, match=r"has SHA-256 \w+, what was signed is \w+: it was changed after"):
        Registry.open(signed, key=keys[1])
    sign(signed, keys[0])  # signed again: the old statement goes
    assert len(envelope(signed)["signatures"]) == 1
    assert Registry.open(signed, key=keys[1]).signed_by


def wrong_signature(document):
    raw = bytearray(base64.b64decode(document["signatures"][0]["sig"]))
    raw[3] ^= 1
    document["signatures"][0]["sig"] = base64.b64encode(raw).decode()


def wrong_payload(document):
    document["payload"] = base64.b64encode(base64.b64decode(document["payload"]).replace(b"nvrtc", b"clang")).decode()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (wrong_signature, "has a wrong signature"),
        (wrong_payload, "has a wrong signature"),
        (lambda d: d.update(payloadType="text/plain"), "is not a DSSE envelope: expected the payload type"),
        (lambda d: d.update(payload="%%%"), "is not a DSSE envelope: expected base64"),
        (lambda d: d.update(signatures=[]), "is signed by other keys .* found none"),
        (lambda d: d.update(signatures=d["signatures"] * 2), "expected one signature of each key"),
        (lambda d: d["signatures"][0].update(sig=""), "has a wrong signature"),
        (lambda d: d.pop("payload"), "is not a DSSE envelope"),
    ],
)
def test_whatever_is_off_in_the_envelope_is_refused(signed, keys, edit, said):
    document = envelope(signed)
    edit(document)
    replace(signed, document)
    with pytest.raises(SignatureError, match=said):
        Registry.open(signed, key=keys[1])


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff" * 9, b"[" * 200_000, b"x" * (17 << 20)])
def test_an_envelope_that_is_none(signed, keys, data):
    (signed / "manifest.json.dsse").write_bytes(data)
    with pytest.raises(SignatureError):
        Registry.open(signed, key=keys[1])


def test_a_statement_of_another_kind_does_not_vouch_for_a_manifest(plain, keys):
    opened = Registry.open(plain)
    statement = signature.manifest_statement(opened.manifest, opened.digest)
    signature.sign(plain / "manifest.json", statement | {"predicateType": signature.TEST_RESULT}, keys[0])
    with pytest.raises(SignatureError, match=r"expected a .* with predicate https://slsa.dev/provenance/v1"):
        Registry.open(plain, key=keys[1])


def test_keys_that_cannot_be_used(plain, keys, tmp_path):
    with pytest.raises(SettingsError, match=r"key: expected a PEM file, cannot read .*No such file"):
        Registry.open(plain, key=tmp_path / "none")
    with pytest.raises(SettingsError, match=r"expected PEM public keys, found none"):
        Registry.open(plain, key=keys[0])  # the private one, by mistake
    secret, public = key_pair(tmp_path, "curve", curve=True)
    with pytest.raises(SettingsError, match=r"expected Ed25519 keys, got one of ecdsa"):
        Registry.open(plain, key=public)
    for wrong in (secret, keys[1], plain / "manifest.json"):
        with pytest.raises(SettingsError, match=r"--key: .*expected an? Ed25519"):
            sign(plain, wrong)
    broken = tmp_path / "broken.pub"
    broken.write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(SettingsError, match="cannot be read"):
        Registry.open(plain, key=broken)
    assert not (plain / "manifest.json.dsse").exists()


def test_a_key_of_a_kind_that_nobody_knows(plain, keys, tmp_path):
    """Its algorithm is an id that no library has; cryptography has an error of its own for that."""
    secret, public = (path.read_bytes().splitlines() for path in keys)
    for lines, name in ((secret, "key.pem"), (public, "key.pub")):
        body = bytearray(base64.b64decode(lines[1]))
        at = body.index(b"\x2b\x65\x70")  # 1.3.101.112, Ed25519
        body[at : at + 3] = b"\x2b\x65\x01"
        (tmp_path / name).write_bytes(b"\n".join([lines[0], base64.b64encode(body), lines[2], b""]))
    with pytest.raises(SettingsError, match=r"key: .* holds a key that cannot be read"):
        Registry.open(plain, key=tmp_path / "key.pub")
    with pytest.raises(SettingsError, match=r"--key: .*expected an Ed25519 private key"):
        signature.check_signer(tmp_path / "key.pem", None)


def test_without_the_library_nothing_is_trusted(signed, keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "securesystemslib", None)
    with pytest.raises(SettingsError, match=r"signatures need securesystemslib: pip install 'chord-registry\[sign\]'"):
        Registry.open(signed, key=keys[1])


def test_no_crypto_is_imported_before_a_key_is_given(signed):
    code = (
        "import sys; from chord.registry import Registry; Registry.open(sys.argv[1]).verify();"
        "print(sorted({'cryptography', 'securesystemslib', 'torch', 'socket', 'ssl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, signed], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
