"""The command line on a small tree: results on standard output, JSON on demand, exit status 1 for every failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import toytree

PROBLEM = ["width=64", "lanes=2", "kind=f32", "num_tokens=1", "block_m=8"]


def chord(*words: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "chord.cli", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = toytree.write(tmp_path_factory.mktemp("tree"))
    document = json.loads(chord("build", "--root", root, "--json"))
    assert document["cubins"] == document["compiled"] == toytree.CUBINS
    assert document["stale"] == []
    return root


def test_a_second_build_compiles_nothing(tree: Path) -> None:
    assert json.loads(chord("build", "--root", tree, "--json"))["compiled"] == 0


def test_check_is_silent_about_an_equal_manifest_and_lists_what_differs(tree: Path, tmp_path: Path) -> None:
    assert "equal to the manifest" in chord("build", "--check", "--root", tree)
    header = tree / "templates/include/common/base.cuh"
    before = header.read_text()
    header.write_text(before + "// one more byte\n")
    try:
        found = json.loads(chord("build", "--check", "--root", tree, "--json", code=1))
    finally:
        header.write_text(before)
    assert len(found["differences"]) == toytree.CUBINS
    assert all("closure" in difference["what"] for difference in found["differences"])


def test_a_locked_build_names_what_differs_and_publishes_nothing(tmp_path: Path) -> None:
    root = toytree.write(tmp_path)
    assert "nothing is recorded" in chord("build", "--locked", "--root", root, code=1)
    assert not (root / "manifest.json").exists()
    chord("build", "--root", root)
    before = (root / "manifest.json").read_bytes()
    chord("build", "--locked", "--root", root)
    toytree.edit(root, "templates/toy/single.cu.j2", "+ {{ num_tokens }}", "- {{ num_tokens }}")
    refused = chord("build", "--locked", "--root", root, code=1)
    assert refused.count("is recorded, the sources give") == 2 * 2 * len(toytree.ARCHS)
    assert "toy.single.w128.l4.f32.t2.bm8 for sm_103a" in refused
    assert (root / "manifest.json").read_bytes() == before


def test_ls_names_every_program_once(tree: Path) -> None:
    listed = json.loads(chord("ls", "--registry", tree, "--json"))
    assert len(listed) == toytree.PROGRAMS
    assert listed["toy.single.w64.l2.f32.t1.bm8"]["num_tokens"] == 1
    assert "toy.single.w64.l2.f32.t1.bm8" in chord("ls", "toy", "--registry", tree)


def test_show_gives_the_program_and_refuses_an_unknown_one(tree: Path) -> None:
    shown = json.loads(chord("show", "toy.single.w64.l2.f32.t1.bm8", "--registry", tree, "--json"))
    assert sorted(shown["program"]["builds"]) == sorted(toytree.ARCHS)
    assert "one block for one token" in chord("show", "toy.single.w64.l2.f32.t1.bm8", "--registry", tree)
    assert "no such program" in chord("show", "toy.single.w64", "--registry", tree, code=1)


def test_lookup_answers_and_says_what_is_allowed(tree: Path) -> None:
    found = json.loads(chord("lookup", "toy", *PROBLEM, "--arch", "sm_90a", "--registry", tree, "--json"))
    assert found["program"] == "toy.single.w64.l2.f32.t1.bm8"
    refused = chord("lookup", "toy", *PROBLEM[:3], "num_tokens=1001", "block_m=8", "--arch", "sm_90a",
                    "--registry", tree, code=1)  # fmt: skip
    assert "num_tokens=1001" in refused
    assert "0..1000" in refused


@pytest.mark.parametrize("arch", ["sm_90", "90a", "sm_100", "sm_100f", "sm_103", "SM_90A", ""])
def test_r08_architecture_names_are_strict(tree: Path, arch: str) -> None:
    for command in (["lookup", "toy", *PROBLEM, "--registry", tree], ["build", "--root", tree]):
        refused = chord(*command, "--arch", arch, code=1)
        assert all(name in refused for name in toytree.ARCHS)


def test_coverage_shows_every_route(tree: Path) -> None:
    routes = json.loads(chord("coverage", "toy", "--arch", "sm_90a", "--registry", tree, "--json"))["toy"]["sm_90a"]
    assert {"where", "program"} == set(routes[0])
    assert "3..1000" in chord("coverage", "toy", "--arch", "sm_90a", "--registry", tree)
    assert "no routes" in chord("coverage", "toy", "--arch", "sm_80", "--registry", tree, code=1)


def test_verify_counts_what_is_wrong(tree: Path) -> None:
    assert json.loads(chord("verify", "--registry", tree, "--json"))["checked"] == toytree.CUBINS
    stranger = tree / "build/out/cubins/deadbeef.cubin"
    stranger.write_bytes(b"no cubin")
    try:
        found = json.loads(chord("verify", "--registry", tree, "--json", code=1))
    finally:
        stranger.unlink()
    assert (found["missing"], found["mismatch"], found["unlisted"]) == (0, 0, 1)


def test_verify_rebuild_compiles_everything_again(tree: Path) -> None:
    assert f"({toytree.CUBINS} compiled now): equal" in chord("verify", "--rebuild", "--registry", tree)


def test_verify_refuses_a_wrong_pin(tree: Path) -> None:
    assert "expects" in chord("verify", "--registry", tree, "--pin", "0" * 64, code=1)


def test_doctor_reports_registry_driver_compiler_and_settings(tree: Path) -> None:
    checks = {check["what"]: check for check in json.loads(chord("doctor", "--registry", tree, "--json"))}
    assert checks["registry"]["status"] == checks["cubins"]["status"] == checks["compiler"]["status"] == "ok"
    assert {"driver", "torch", "CHORD_REGISTRY", "CHORD_PIN"} <= set(checks)


def test_a_broken_template_fails_with_place_and_log(tmp_path: Path) -> None:
    root = toytree.write(tmp_path)
    toytree.edit(root, "templates/toy/single.cu.j2", "toy::scale(threadIdx.x, factor)", "missing_name")
    refused = chord("build", "--root", root, code=1)
    assert "missing_name" in refused
    assert "toy.single.w64.l2.f32.t1.bm8" in refused
    assert not (root / "manifest.json").exists()


@pytest.mark.parametrize("command", [["bench", "router"], ["bench", "host"], ["tune", "router"], ["qualify"]])
def test_commands_for_a_gpu_say_what_they_miss(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "chord.cli", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "this command needs" in done.stderr
    assert list(tmp_path.iterdir()) == []
