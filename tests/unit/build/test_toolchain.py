"""The compiler is the pinned one, byte for byte, and any other is refused by name."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build import jobs, toolchain
from chord.build.toolchain import CompilerPin, ToolchainPin
from chord.build.tree import Tree
from chord.errors import DamagedCompilerError, TableError, ToolchainError

REAL = toolchain.load(_paths.PACKAGE.parent / "build" / "toolchain.toml")
FILES = {"libnvrtc.so.12": b"the compiler", "libnvrtc-builtins.so.12.9": b"its builtins"}


def pin(**libraries: dict[str, str]) -> ToolchainPin:
    """The real pin with the digests of FILES."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    return ToolchainPin(
        schema=1,
        compiler=REAL.compiler,
        libraries=libraries or {toolchain.this_platform(): digests},
        architectures=REAL.architectures,
    )


def install(site: Path, name: str, version: str, files: dict[str, bytes], folder: str) -> None:
    """A distribution as pip leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = []
    for file, data in files.items():
        path = site / "nvidia" / folder / "lib" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        record.append(f"{path.relative_to(site).as_posix()},,\n")
    (info / "RECORD").write_text("".join(record))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where distributions are looked for."""
    standard_library = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *standard_library])
    return tmp_path


def test_finds_the_pinned_files_beside_cuda_13s(site: Path) -> None:
    install(site, "nvidia-cuda-nvrtc", "13.0.88", {"libnvrtc.so.13": b"", "libnvrtc-builtins.so.13.0": b""}, "cu13")
    install(site, "nvidia-cuda-nvrtc-cu12", "12.9.86", FILES, "cuda_nvrtc")
    found = toolchain.find(pin())
    assert found.nvrtc == site / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    assert found.builtins == found.nvrtc.with_name("libnvrtc-builtins.so.12.9")


def test_the_only_compiler_is_another(site: Path) -> None:
    install(site, "nvidia-cuda-nvrtc", "13.0.88", {"libnvrtc.so.13": b""}, "cu13")
    with pytest.raises(
        ToolchainError,
        match=r"is not installed: pip install .*; found and refused: nvidia-cuda-nvrtc 13\.0\.88",
    ):
        toolchain.find(pin())


def test_no_compiler(site: Path) -> None:
    with pytest.raises(
        ToolchainError, match=r"nvrtc 12\.9\.86 .* is not installed: pip install 'chord-registry\[build\]'$"
    ):
        toolchain.find(pin())


def test_another_version_of_the_distribution(site: Path) -> None:
    install(site, "nvidia-cuda-nvrtc-cu12", "12.8.93", FILES, "cuda_nvrtc")
    with pytest.raises(
        ToolchainError, match=r"compiler refused: nvidia-cuda-nvrtc-cu12 12\.8\.93 is installed, the pin is 12\.9\.86"
    ):
        toolchain.find(pin())


@pytest.mark.parametrize("altered", FILES)
def test_other_bytes_under_the_right_name(site: Path, altered: str) -> None:
    install(site, "nvidia-cuda-nvrtc-cu12", "12.9.86", {**FILES, altered: b"tampered with"}, "cuda_nvrtc")
    with pytest.raises(DamagedCompilerError, match=rf"{altered}: expected SHA-256 .* not loaded"):
        toolchain.find(pin())


def test_a_file_that_is_listed_but_gone(site: Path) -> None:
    install(site, "nvidia-cuda-nvrtc-cu12", "12.9.86", FILES, "cuda_nvrtc")
    (site / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12").unlink()
    with pytest.raises(
        DamagedCompilerError, match=r"libnvrtc\.so\.12(: expected the pinned library|, found 0; reinstall)"
    ):
        toolchain.find(pin())


def test_a_distribution_without_the_file(site: Path) -> None:
    install(site, "nvidia-cuda-nvrtc-cu12", "12.9.86", {"libnvrtc.so.12": FILES["libnvrtc.so.12"]}, "cuda_nvrtc")
    with pytest.raises(DamagedCompilerError, match=r"expected one file libnvrtc-builtins\.so\.12\.9, found 0"):
        toolchain.find(pin())


def test_a_platform_without_a_pin() -> None:
    other = {"linux-riscv64": dict.fromkeys(FILES, "0" * 64)}
    with pytest.raises(ToolchainError, match=rf"pinned for linux-riscv64, this machine is {toolchain.this_platform()}"):
        toolchain.find(pin(**other))


@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "linux-x86_64"), ("AMD64", "linux-x86_64"), ("arm64", "linux-aarch64")]
)
def test_platform_names(monkeypatch: pytest.MonkeyPatch, machine: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert toolchain.this_platform() == name


def test_both_platforms_are_pinned_and_the_identity_names_none() -> None:
    assert set(REAL.libraries) == {"linux-x86_64", "linux-aarch64"}
    assert REAL.identity == "nvrtc 12.9.86"
    assert isinstance(REAL.compiler, CompilerPin)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "nvrtc"', 'name = "nvcc"', r"toolchain\.toml:5: compiler\.name|compiler\.name"),
        ('"--no-cache",', "", r"architectures\.sm_90a: options refused: none; missing: --no-cache"),
        ('"--no-source-include",', "", r"missing: --no-source-include"),
        ('"--std=c++17",', '"--std=c++17", "--generate-line-info",', r"options refused: --generate-line-info"),
        ('"--std=c++17",', '"--std=c++17", "-I/usr/include",', r"options refused: -I/usr/include"),
        *(
            (
                '"--std=c++17",',
                f'"--std=c++17", "--ptxas-options={option}",',
                f"options refused: --ptxas-options={option}",
            )
            for option in (
                "--options-file=more",
                "-optf=more",
                "--generate-line-info",
                "--opt-level=3,--options-file=more",
                "--opt-level=",
            )
        ),
        (
            '["--gpu-architecture=sm_103a"]',
            '["--gpu-architecture=sm_103"]',
            r"architectures\.sm_103a: .* missing: --gpu-architecture=sm_103a",
        ),
        ("min_driver = 12090", 'min_driver = "12.9"', r"architectures.*expected `int`, got `str`"),
        ('"libnvrtc.so.12" = "7c', '"libnvrtc.so.12" = "7', r"libraries.*expected `str` matching regex"),
        ('"libnvrtc.so.12" = "7c', '"libnvrtd.so.12" = "7c', r"libraries\.linux-x86_64: expected libnvrtc\.so"),
    ],
)
def test_mistakes_in_the_pin(tmp_path: Path, old: str, new: str, said: str) -> None:
    root = toytree.write(tmp_path)
    toytree.edit(root, "build/toolchain.toml", old, new)
    with pytest.raises(TableError, match=said):
        jobs.read(Tree(root))
