"""`chord doctor`: what this machine can do with chord, where each setting came from, and what is missing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Annotated

import typer

from chord import _settings
from chord._version import __version__
from chord.cli._output import Json, RegistryPath, missing_extra, open_registry, print_json, print_table
from chord.errors import (
    ChordError,
    DamagedCompilerError,
    ReceiptError,
    ToolchainError,
    UnsupportedDeviceError,
    VerificationError,
)
from chord.registry import Registry
from chord.registry.architectures import ordered
from chord.registry.driver import Driver
from chord.registry.facade import MANIFEST_NAME
from chord.registry.signature import envelope_path


@dataclass(frozen=True)
class Check:
    """One line of the report. `status`: ok, missing (what is optional), unknown (a setting) or failed."""

    what: str
    status: str
    found: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    registry: RegistryPath = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 for anything missing or unknown, too, not only for failures.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what this machine can do: registry, cubins, driver, devices, torch, compiler, settings."""
    opened, checks = _registry_checks(registry)
    checks += _device_checks(opened)
    checks += [_torch_check(), _compiler_check()]
    checks += _setting_checks()
    if json:
        print_json([{"what": c.what, "status": c.status, "found": c.found, "advice": c.advice} for c in checks])
    else:
        print_table(
            f"chord {__version__}, Python {platform.python_version()}", ("", "", "found", "what to do"), _rows(checks)
        )
    bad = {"failed", "missing", "unknown"} if strict else {"failed"}
    if any(check.status in bad for check in checks):
        raise typer.Exit(1)


def _rows(checks: list[Check]) -> list[tuple[str, str, str, str]]:
    return [(check.what, check.status, check.found, check.advice) for check in checks]


def _registry_checks(path: str | None) -> tuple[Registry | None, list[Check]]:
    try:
        opened = open_registry(path)
    except ChordError as error:
        return None, [Check("registry", "failed", str(error))]
    info = opened.manifest.registry
    where = f"{info.version}, serial {info.serial}, in {opened.root} (from {opened.source}), manifest {opened.digest}"
    checks = [Check("registry", "ok", where), _store_check(opened), _proof_check(opened), _receipt_check(opened)]
    return opened, checks


def _store_check(opened: Registry) -> Check:
    try:
        report = opened.verify()
    except VerificationError as error:
        return Check("cubins", "failed", str(error))
    if report.ok:
        return Check("cubins", "ok", f"{report.checked} verified in {opened.store.root}")
    found = ", ".join(f"{report.count(kind)} {kind}" for kind in ("missing", "mismatch", "unlisted"))
    advice = "chord verify lists them; chord build restores them"
    return Check("cubins", "failed", f"{report.checked} named, {found}", advice)


def _proof_check(opened: Registry) -> Check:
    """Whether somebody vouches for the manifest, and whether that was asked for."""
    if opened.signed_by:
        return Check("signature", "ok", f"by a required key, {opened.signed_by}")
    signed = envelope_path(opened.root / MANIFEST_NAME).exists()
    found = "there is one, not checked" if signed else "not signed"
    return Check("signature", "ok", found, "CHORD_KEY=public.pem requires one; chord verify --key checks it")


def _receipt_check(opened: Registry) -> Check:
    try:
        ran = {
            arch: [opened.receipts.suffices(p.builds[arch].cubin_sha256) for p in opened.programs(arch=arch).values()]
            for arch in _architectures(opened)
        }
    except ReceiptError as error:
        return Check("receipts", "failed", str(error))
    found = ", ".join(f"{arch} {sum(found)} of {len(found)} programs" for arch, found in ran.items())
    advice = "chord qualify writes them"
    if opened.signed_by:  # others do not count
        advice = "chord qualify --key writes signed ones, chord sign --receipt signs those that are there"
    if not opened.require_receipt:
        return Check("receipts", "ok", found, advice)
    if not any(map(any, ran.values())):
        return Check("receipts", "failed", found, f"required, so that nothing can be loaded: {advice}")
    return Check("receipts", "ok", found, "required: no other program is loaded")


def _device_checks(opened: Registry | None) -> list[Check]:
    driver = Driver()
    try:
        version, count = driver.version(), driver.device_count()
    except ChordError as error:
        return [
            Check("driver", "missing", str(error).partition(";")[0], "needed to run kernels, not to build or verify")
        ]
    checks = [Check("driver", "ok", f"supports CUDA {version // 1000}.{version % 1000 // 10}, {count} devices")]
    return checks + [_device_check(driver, device, opened) for device in range(count)]


def _device_check(driver: Driver, device: int, opened: Registry | None) -> Check:
    what = f"device {device}"
    capability = "{}.{}".format(*driver.capability(device))
    try:
        arch = driver.architecture(device)
    except UnsupportedDeviceError as error:
        return Check(what, "missing", str(error), "no cubin exists for it; the CPU reference works")
    if opened is None:
        return Check(what, "ok", f"compute capability {capability}, takes {arch}")
    programs = opened.programs(arch=arch)
    if not programs:
        return Check(what, "missing", f"takes {arch}", f"this registry has {', '.join(_architectures(opened))}")
    return Check(what, "ok", f"compute capability {capability}, takes {arch}: {len(programs)} programs")


def _architectures(opened: Registry) -> list[str]:
    return ordered({arch for program in opened.programs().values() for arch in program.builds})


def _torch_check() -> Check:
    try:
        return Check("torch", "ok", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Check("torch", "missing", "not installed", "pip install 'chord-registry[torch]' for the operators")


def _compiler_check() -> Check:
    use = "needed to build and for verify --rebuild, not to run"
    try:
        import_module("chord.build.builder")  # with everything that a build imports
        from chord.build import toolchain
        from chord.build.tree import Tree

        pin = toolchain.load(Tree.default().toolchain)
        libraries = toolchain.find(pin)
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        return Check("compiler", "missing", f"not usable without {advice}", use)
    except ChordError as error:
        absent = isinstance(error, ToolchainError) and not isinstance(error, DamagedCompilerError)
        return Check("compiler", "missing" if absent else "failed", str(error), use)
    return Check("compiler", "ok", f"{pin.identity}, {libraries.nvrtc}")


def _setting_checks() -> list[Check]:
    known = [_setting_check(name, meaning) for name, meaning in sorted(_settings.KNOWN.items())]
    unknown = (Check(name, "unknown", os.environ[name], _settings.advice(name)) for name in _settings.unknown())
    return [*known, *unknown]


def _setting_check(name: str, meaning: str) -> Check:
    value = os.environ.get(name)
    if value is None:
        return Check(name, "ok", "not set", meaning)
    try:
        read = _settings.read({name: value})
    except ChordError as error:
        return Check(name, "failed", str(error), meaning)
    if read.registry is not None and not (read.registry / MANIFEST_NAME).is_file():
        return Check(name, "failed", f"{value} holds no {MANIFEST_NAME}", meaning)
    for path in (read.lock, read.key):
        if path is not None and not path.is_file():
            return Check(name, "failed", f"{value} is no file", meaning)
    if read.receipts is not None and not read.receipts.is_dir():
        return Check(name, "failed", f"{value} is no folder", meaning)
    return Check(name, "ok", value, meaning if name in _settings.WITHOUT_EFFECT else "")
