"""R23 to R25 from the outside: the command line on the committed registry and on a small tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import toytree
from chord import _paths

ROOT = _paths.PACKAGE.parent


def chord(*words, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CHORD_")}
    return subprocess.run(
        [sys.executable, "-m", "chord", *map(str, words)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**kept, **environment},
    )  # fmt: skip


def test_r23_settings_are_never_silently_ignored(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = chord("verify", CHORD_REGISTRY=str(empty))
    assert refused.returncode == 1
    assert f"CHORD_REGISTRY: expected a registry in {empty}" in refused.stderr
    assert chord("ls", "--registry", ROOT, CHORD_REGISTRY=str(empty)).returncode == 0, "an argument beats it"
    said = chord("ls", CHORD_REGISTYR="/somewhere")
    assert said.returncode == 0
    assert said.stderr.count("CHORD_REGISTYR is not a variable that chord knows") == 1
    digest = json.loads(chord("verify", "--json").stdout)["manifest_sha256"]
    printed = chord("doctor", "--registry", ROOT).stdout
    assert digest in printed
    assert "(from --registry)" in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CHORD_PIN", "abc"), ("CHORD_LOCK", "/nonexistent/chord.lock"), ("CHORD_KEY", "/nonexistent/key.pub"),
        ("CHORD_RECEIPTS", "/nonexistent"), ("CHORD_REQUIRE_RECEIPT", "true"), ("CHORD_REGISTRY", ""),
    ],
)  # fmt: skip
def test_r23_a_value_that_cannot_be_honoured_is_refused(name, value):
    refused = chord("verify", **{name: value})
    assert refused.returncode == 1
    assert name in refused.stderr
    listed = chord("doctor", **{name: value})
    assert listed.returncode == 1


def test_r24_and_r25_an_error_names_its_place_and_publishes_nothing(tmp_path):
    """An undefined name on one architecture, then a good build, then one more byte in a header behind #if."""
    root = toytree.write(tmp_path / "tree")
    assert chord("build", "--root", root).returncode == 0
    before = {path: path.read_bytes() for path in [root / "manifest.json", *(root / "build/out/cubins").iterdir()]}
    single = "templates/toy/single.cu.j2"
    toytree.edit(root, single, "    constexpr int kThreads", "    NOWHERE\n    constexpr int kThreads")
    toytree.edit(root, single, "NOWHERE", "#if __CUDA_ARCH__ == 1030\n    nowhere(factor);\n#endif")
    refused = chord("build", "--root", root)
    assert refused.returncode == 1
    assert "toy.single.w64.l2.f32.t1.bm8 for sm_103a: toy.single.w64.l2.f32.t1.bm8.cu:5" in refused.stderr
    assert 'identifier "nowhere" is undefined' in refused.stderr
    now = {path: path.read_bytes() for path in [root / "manifest.json", *(root / "build/out/cubins").iterdir()]}
    assert now == before
    toytree.edit(root, single, "nowhere(factor);", "")
    done = chord("build", "--root", root, "--json")
    report = json.loads(done.stdout)
    assert (report["compiled"], report["cubins"]) == (4 * 3, toytree.CUBINS)
    toytree.edit(root, "templates/include/common/verbose.cuh", "#pragma once", "#pragma once  // one byte more")
    os.utime(root / "templates/include/common/verbose.cuh", (1, 1))
    found = json.loads(chord("build", "--check", "--root", root, "--json").stdout)
    assert len(found["differences"]) == toytree.CUBINS, "a header behind #if counts, whatever its time"
