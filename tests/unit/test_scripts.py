"""What the scripts say to a wrong folder; what they measure needs a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

from chord import _paths

ROOT = _paths.PACKAGE.parent


@pytest.mark.parametrize("script", [*sorted(ROOT.glob("scripts/*.sh")), ROOT / ".ci/run"], ids=lambda path: path.name)
def test_shell_scripts_parse_and_say_what_they_are_for(script: Path):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" or script.name == "_env.sh"
    assert any(line.startswith("# ") for line in lines[:2])


@pytest.fixture
def bench_vllm():
    spec = importlib.util.spec_from_file_location("bench_vllm", _paths.PACKAGE.parent / "scripts" / "bench_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folder_without_the_wheel(bench_vllm, tmp_path: Path):
    with pytest.raises(SystemExit, match=r"--peers .*: expected a wheel whl/humming_kernels-\*\.whl"):
        bench_vllm.unpacked(tmp_path)


def test_the_latest_wheel_is_unpacked(bench_vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "whl").mkdir()
    for version in ("0.1", "0.2"):
        with zipfile.ZipFile(tmp_path / "whl" / f"humming_kernels-{version}-any.whl", "w") as wheel:
            wheel.writestr("version", version)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = bench_vllm.unpacked(tmp_path)
    assert (folder / "version").read_text() == "0.2"
    assert (folder / "version").stat().st_mode & 0o111
