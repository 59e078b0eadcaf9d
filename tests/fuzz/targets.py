"""What reads data that others wrote, as functions of bytes: for Hypothesis (test_decoding.py) and for Atheris.

A target returns for good data, raises one of its `clean` errors for anything else, and nothing else ever.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from chord import _paths
from chord.build import tables, toolchain
from chord.build.plan import plan_operator
from chord.build.render import Renderer
from chord.build.toolchain import ToolchainPin
from chord.errors import ChordError
from chord.registry import canonical, cubin, lock, receipts, signature
from chord.registry.names import ProgramName
from chord.registry.schema import Manifest

ROOT = _paths.PACKAGE.parent


class Target(NamedTuple):
    run: Callable[[bytes], object]
    clean: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]


@cache
def _pin() -> ToolchainPin:
    return toolchain.load(ROOT / "build" / "toolchain.toml")


@cache
def _renderer() -> Renderer:
    return Renderer(ROOT / "templates")


@cache
def _file() -> Path:
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="chord-fuzz-", dir=folder)) / "table.toml"


def _manifest() -> Manifest:
    from unit.registry.samples import plain_manifest

    return plain_manifest()


def run_table(data: bytes) -> object:
    """An operator's table, up to its programs and routes."""
    _file().write_bytes(data)
    table, cells = tables.load(_file(), "table.toml")
    return plan_operator(tables.lend(table, cells, _lenders()), cells, _renderer(), _pin())


@cache
def _lenders() -> dict[str, tables.Table]:
    """The tables that others borrow from."""
    return {"moe_w4a16": tables.load(ROOT / "registry" / "moe_w4a16.toml")[0]}


def run_registry_table(data: bytes) -> object:
    _file().write_bytes(data)
    return tables.load_registry(_file(), "registry.toml")


def run_pin(data: bytes) -> object:
    _file().write_bytes(data)
    return toolchain.load(_file(), "toolchain.toml")


def run_cubin(data: bytes) -> object:
    assert len(cubin.describe(data)) < 300
    return cubin.parse(data)


def run_envelope(data: bytes) -> object:
    envelope = signature._decode_envelope(data)
    return signature._require_subject(envelope.payload, "0" * 64, signature.PROVENANCE, "here")


def run_keys(data: bytes) -> object:
    _file().write_bytes(data)
    return signature._public_keys(_file(), "here")


class _Signed(NamedTuple):
    """A manifest with its envelope beside it, which runs overwrite, and the public key that vouches for it."""

    path: Path
    public: Path
    digest: str
    envelope: bytes


@cache
def _signed() -> _Signed:
    from signing import key_pair

    path = _file().with_name("manifest.json")
    secret, public = key_pair(path.parent, "fuzz")
    path.write_bytes(canonical.encode(_manifest()))
    digest = canonical.digest(path.read_bytes())
    signature.sign(path, signature.manifest_statement(_manifest(), digest), secret)
    return _Signed(path, public, digest, signature.envelope_path(path).read_bytes())


def run_signature(data: bytes) -> object:
    """An envelope, all the way to the key's verdict."""
    signed = _signed()
    signature.envelope_path(signed.path).write_bytes(data)
    return signature.verify(signed.path, signed.digest, signature.PROVENANCE, signed.public, "here")


def _seed_manifest() -> list[bytes]:
    return [canonical.encode(_manifest())]


def _seed_lock() -> list[bytes]:
    return [lock.encode(lock.lock_of(_manifest(), "0" * 64))]


def _receipt() -> receipts.Receipt:
    return receipts.Receipt(
        schema=1, date="2026-11-30T10:00:00Z", gpu="NVIDIA H200", arch="sm_90a",
        driver=receipts.DriverVersion(cuda=13000, nvidia=None), software={"torch": "2.11"}, manifest_sha256="0" * 64,
        sanitizer=None, tiny=False, checks={"toy": ("a", "b")},
        programs={"toy.one.t1": receipts.Outcome(cubin_sha256="1" * 64, cases=3, passed=False, problems=("x",))},
    )  # fmt: skip


def _seed_envelope() -> list[bytes]:
    from base64 import b64encode

    made = signature.canonical_json(signature.manifest_statement(_manifest(), "0" * 64))
    document = {
        "payload": b64encode(made).decode(),
        "payloadType": signature.PAYLOAD_TYPE,
        "signatures": [{"keyid": "a" * 64, "sig": b64encode(bytes(64)).decode()}],
    }
    return [signature.canonical_json(document)]


def _seed_tables() -> list[bytes]:
    import toytree

    real = [path.read_bytes() for path in sorted((ROOT / "registry").glob("*.toml")) if path.name != "registry.toml"]
    return [toytree.TABLE.encode(), *real]


def _seed_cubins() -> list[bytes]:
    """A small one of each architecture, as far as they were built here."""
    from chord.registry import Registry

    opened = Registry.open(relock=True)
    smallest: dict[str, tuple[int, str]] = {}
    for program in opened.programs().values():
        for arch, build in program.builds.items():
            smallest[arch] = min(smallest.get(arch, (1 << 30, "")), (build.size_bytes, build.cubin_sha256))
    paths = [opened.store.path_of(sha256) for _, sha256 in smallest.values()]
    return [path.read_bytes() for path in paths if path.is_file()] or [b"\x7fELF\x02\x01\x01\x33" + bytes(500)]


TARGETS = {
    "manifest": Target(lambda data: canonical.decode(data, "here"), (ChordError,), _seed_manifest),
    "lock": Target(lambda data: lock.decode(data, "here"), (ChordError,), _seed_lock),
    "receipt": Target(lambda data: receipts.decode(data, "here"), (ChordError,), lambda: [receipts.encode(_receipt())]),
    "envelope": Target(run_envelope, (ChordError, ValueError), _seed_envelope),
    "signature": Target(run_signature, (ChordError,), lambda: [_signed().envelope]),
    "keys": Target(run_keys, (ChordError,), lambda: [_signed().public.read_bytes()]),
    "table": Target(run_table, (ChordError,), _seed_tables),
    "registry_table": Target(run_registry_table, (ChordError,), lambda: [b'version = "0.1.0"\nserial = 3\n']),
    "toolchain": Target(run_pin, (ChordError,), lambda: [(ROOT / "build" / "toolchain.toml").read_bytes()]),
    "cubin": Target(run_cubin, (ChordError,), _seed_cubins),
    "name": Target(
        lambda data: ProgramName.parse(data.decode(errors="replace")), (ValueError,), lambda: [b"a.b.t1.bm8"]
    ),
}


def try_one(name: str, data: bytes) -> str:
    """Run a target and let nothing but its clean errors through; what it said, empty for good data."""
    target = TARGETS[name]
    said = ""
    try:
        target.run(data)
    except target.clean as error:
        said = str(error)
    assert len(said) < 20_000, f"{name}: a message of {len(said)} characters"
    return said
