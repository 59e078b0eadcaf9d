"""The project itself: its source distribution has every file, its wheel exactly the committed manifest's cubins."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from chord import _paths

pytestmark = pytest.mark.packaging

ROOT = _paths.PACKAGE.parent
NOT_SHIPPED = (".ci/", ".gitattributes", ".github/")
MAX_WHEEL_BYTES = 25 * 1024 * 1024


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel, both from this tree; what build/out lacks is compiled."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: no list of files to compare with")
def test_sdist_has_every_committed_file(distributions: tuple[Path, Path]) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    committed = {name for name in listed.stdout.splitlines() if not name.startswith(NOT_SHIPPED)}
    with tarfile.open(distributions[0]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert committed - packed == set()


def test_wheel_has_exactly_the_manifests_cubins(distributions: tuple[Path, Path]) -> None:
    manifest = json.loads((ROOT / "manifest.json").read_text())
    named = {
        build["cubin_sha256"]
        for operator in manifest["operators"].values()
        for program in operator["programs"].values()
        for build in program["builds"].values()
    }
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = wheel.namelist()
        assert wheel.read("chord/_data/manifest.json") == (ROOT / "manifest.json").read_bytes()
    assert {Path(name).stem for name in names if name.endswith(".cubin")} == named
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"chord"}


def test_wheel_is_small_enough(distributions: tuple[Path, Path]) -> None:
    assert distributions[1].stat().st_size < MAX_WHEEL_BYTES
