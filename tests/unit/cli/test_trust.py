"""`chord lock`, `sign`, `verify --lock --key`, receipts in `ls`, `coverage` and `doctor`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from unit.cli.test_cli import chord, run

import toytree
from chord.registry import Registry, receipts
from chord.registry.receipts import DriverVersion, Outcome, Receipt
from signing import key_pair


@pytest.fixture(scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = toytree.write(tmp_path_factory.mktemp("trust"))
    chord("build", "--root", root)
    return root


@pytest.fixture
def tree(_built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_built, tmp_path / "tree"))


def publish_serial(tree: Path, old: int, new: int) -> None:
    toytree.edit(tree, "registry/registry.toml", f"serial = {old}", f"serial = {new}")
    chord("build", "--root", tree)


def test_lock_then_verify(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "deployed.lock"
    said = json.loads(chord("lock", "--registry", tree, "--out", path, "--json"))
    assert (said["serial"], said["cubins"], said["path"]) == (3, toytree.CUBINS, str(path))
    chord("verify", "--registry", tree, "--lock", path)
    chord("lock", "--check", "--registry", tree, "--out", path)
    assert run("verify", "--registry", str(tree), CHORD_LOCK=str(path)).returncode == 0
    before = path.read_bytes()
    publish_serial(tree, 3, 4)
    assert "lock: " in chord("verify", "--registry", tree, "--lock", path, code=1)
    assert "is not the lock of" in chord("lock", "--check", "--registry", tree, "--out", path, code=1)
    assert path.read_bytes() == before
    chord("lock", "--registry", tree, "--out", path)
    chord("verify", "--registry", tree, "--lock", path)


def test_lock_takes_its_place_from_the_setting_and_lies_in_the_working_folder_else(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "set.lock"
    assert run("lock", "--registry", str(tree), CHORD_LOCK=str(path)).returncode == 0
    assert path.is_file()
    command = "import os, sys; os.chdir(sys.argv.pop(1)); from chord.cli import main; main()"
    words = [sys.executable, "-c", command, tree, "lock", "--registry", tree]
    assert subprocess.run(words, check=False).returncode == 0
    assert (tree / "chord.lock").read_bytes() == path.read_bytes()
    publish_serial(tree, 3, 4)  # a build is not held back by the lock, whoever opens the registry is
    assert "the registry's folder" in chord("verify", "--registry", tree, code=1)


def test_lock_refuses_to_go_back_and_what_does_not_verify(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "chord.lock"
    old = (tree / "manifest.json").read_bytes()
    publish_serial(tree, 3, 5)
    chord("lock", "--registry", tree, "--out", path)
    (tree / "manifest.json").write_bytes(old)
    assert "refused as a rollback" in chord("lock", "--registry", tree, "--out", path, code=1)
    assert "refused as a rollback" in chord("verify", "--registry", tree, "--lock", path, code=1)
    path.unlink()
    publish_serial(tree, 5, 6)
    assert "expected a lock file, found none" in chord("lock", "--check", "--registry", tree, "--out", path, code=1)
    next((tree / "build/out/cubins").iterdir()).unlink()
    assert "1 cubins are not right" in chord("lock", "--registry", tree, "--out", path, code=1)
    assert not path.exists()


@pytest.mark.parametrize("binding", ["beside the manifest", "CHORD_LOCK"])
def test_lock_into_another_file_refuses_to_go_back_too(tree: Path, tmp_path: Path, binding: str) -> None:
    kept = tree / "chord.lock" if binding == "beside the manifest" else tmp_path / "kept.lock"
    environment = {} if binding == "beside the manifest" else {"CHORD_LOCK": str(kept)}
    old = (tree / "manifest.json").read_bytes()
    publish_serial(tree, 3, 5)
    chord("lock", "--registry", tree, "--out", kept)
    (tree / "manifest.json").write_bytes(old)
    refused = run("lock", "--registry", tree, "--out", tmp_path / "new.lock", **environment)
    assert (refused.returncode, f"{kept} locks serial 5: refused as a rollback" in refused.stderr) == (1, True)
    assert not (tmp_path / "new.lock").exists()


def test_what_lies_there_and_is_no_lock_file_is_not_written_over(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "chord.lock"
    path.write_text("{}")
    said = chord("lock", "--registry", tree, "--out", path, code=1)
    assert f"{path} is not a lock file" in said
    assert "write one with `chord lock`, and move that file away first" in said
    assert path.read_text() == "{}"


@pytest.mark.parametrize("name", ["CHORD_LOCK", "CHORD_KEY", "CHORD_PIN"])
def test_a_build_that_writes_contradicts_what_is_pinned(tree: Path, tmp_path: Path, name: str) -> None:
    value = "0" * 64 if name == "CHORD_PIN" else str(tmp_path / "file")
    refused = run("build", "--root", str(tree), **{name: value})
    assert (refused.returncode, f"{name} is set" in refused.stderr) == (1, True)


def test_sign_then_verify(tree: Path, tmp_path: Path) -> None:
    secret, public = key_pair(tmp_path, "ours")
    _, other = key_pair(tmp_path, "other")
    assert "is not signed" in chord("verify", "--registry", tree, "--key", public, code=1)
    (said,) = json.loads(chord("sign", "--registry", tree, "--key", secret, "--json"))
    found = json.loads(chord("verify", "--registry", tree, "--key", public, "--json"))
    assert found["signed_by"] == said["keyid"]
    assert "signed by other keys" in chord("verify", "--registry", tree, "--key", other, code=1)
    assert f"signed with key {said['keyid']}" in chord("verify", "--registry", tree, "--key", public)
    assert "signed by other keys" in run("ls", "--registry", str(tree), CHORD_KEY=str(other)).stderr
    assert run("build", "--check", "--root", str(tree), CHORD_KEY=str(public)).returncode == 0
    publish_serial(tree, 3, 4)
    assert "changed after it was signed" in chord("verify", "--registry", tree, "--key", public, code=1)
    next((tree / "build/out/cubins").iterdir()).unlink()
    assert "not signed" in chord("sign", "--registry", tree, "--key", secret, code=1)


def test_sign_where_a_key_is_required_takes_such_a_key_alone(tree: Path, tmp_path: Path) -> None:
    secret, public = key_pair(tmp_path, "ours")
    _, other = key_pair(tmp_path, "other")
    words = ("sign", "--registry", str(tree), "--key", str(secret))
    refused = run(*words, CHORD_KEY=str(other))
    assert (refused.returncode, "what it signs would be refused here" in refused.stderr) == (1, True)
    assert not (tree / "manifest.json.dsse").exists()
    assert run(*words, CHORD_KEY=str(public)).returncode == 0, "nothing is signed before the first signature"
    assert run("ls", "--registry", str(tree), CHORD_KEY=str(public)).returncode == 0
    publish_serial(tree, 3, 4)
    assert run("ls", "--registry", str(tree), CHORD_KEY=str(public)).returncode == 1
    assert run(*words, CHORD_KEY=str(public)).returncode == 0
    assert run("ls", "--registry", str(tree), CHORD_KEY=str(public)).returncode == 0


def test_receipts_that_do_not_count_are_told_apart(tree: Path, tmp_path: Path) -> None:
    secret, public = key_pair(tmp_path, "ours")
    path = leave_receipt(tree, "toy.many.w64.l2.f32")
    chord("sign", "--registry", tree, "--key", secret)

    def told() -> tuple[bool, str]:
        shown = run("ls", "--registry", str(tree), CHORD_KEY=str(public)).stdout
        checks = json.loads(run("doctor", "--registry", str(tree), "--json", CHORD_KEY=str(public)).stdout)
        (check,) = (check for check in checks if check["what"] == "receipts")
        assert "chord sign --receipt" in check["advice"], "one that is written without a key would not count"
        return "NVIDIA H200 (not signed by a required key)" in shown, check["found"].partition(" of ")[0]

    assert told() == (True, "sm_90a 0")
    chord("sign", "--key", secret, "--receipt", path)
    assert told() == (False, "sm_90a 1")


def leave_receipt(tree: Path, name: str, *, passed: bool = True) -> Path:
    opened = Registry.open(tree)
    made = Receipt(
        schema=1, date="2026-11-30T10:00:00Z", gpu="NVIDIA H200", arch="sm_90a",
        driver=DriverVersion(cuda=1, nvidia=None), software={}, manifest_sha256=opened.digest,
        sanitizer=None, tiny=False, checks={},
        programs={name: Outcome(
            cubin_sha256=opened.programs()[name].builds["sm_90a"].cubin_sha256, cases=1, passed=passed)},
    )  # fmt: skip
    path = tree / receipts.FOLDER / "h200.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(receipts.encode(made))
    return path


def test_receipts_are_shown(tree: Path, tmp_path: Path) -> None:
    name = "toy.many.w64.l2.f32"
    path = leave_receipt(tree, name)
    listed = json.loads(chord("ls", "--registry", tree, "--json"))
    ran = {program: entry["ran_on"]["sm_90a"] for program, entry in listed.items()}
    assert ran.pop(name) == ["NVIDIA H200"]
    assert set(map(tuple, ran.values())) == {()}
    assert chord("ls", "--registry", tree).count("sm_90a: NVIDIA H200") == 1
    routes = json.loads(chord("coverage", "toy", "--arch", "sm_90a", "--registry", tree, "--json"))["toy"]["sm_90a"]
    assert {route["program"] for route in routes if route["ran_on"]} == {name}
    assert "NVIDIA H200" in chord("coverage", "toy", "--arch", "sm_90a", "--registry", tree)
    assert "NVIDIA H200" in chord("show", name, "--registry", tree)
    checks = {check["what"]: check for check in json.loads(run("doctor", "--registry", str(tree), "--json").stdout)}
    assert checks["receipts"]["found"].startswith(f"sm_90a 1 of {toytree.PROGRAMS} programs, sm_100a 0 of")
    secret, _ = key_pair(tmp_path, "ours")
    assert "h200.json.dsse: signed with key" in chord("sign", "--key", secret, "--receipt", path)
    path.write_text("{}")
    assert "is not a receipt" in chord("ls", "--registry", tree, code=1)


def test_the_name_of_a_file_that_is_no_receipt_is_one_line(tree: Path) -> None:
    folder = tree / receipts.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a\nall is well\u202e.json").write_text("{}")
    assert "a\\nall is well\\u202e.json is not a receipt" in chord("ls", "--registry", tree, code=1)


def test_doctor_counts_what_passed(tree: Path) -> None:
    leave_receipt(tree, "toy.many.w64.l2.f32", passed=False)
    checks = {check["what"]: check for check in json.loads(run("doctor", "--registry", str(tree), "--json").stdout)}
    assert checks["receipts"]["found"].startswith("sm_90a 0 of")


def test_doctor_fails_where_receipts_are_required_and_there_are_none(tree: Path) -> None:
    done = run("doctor", "--registry", str(tree), "--json", CHORD_REQUIRE_RECEIPT="1")
    (check,) = (check for check in json.loads(done.stdout) if check["what"] == "receipts")
    assert (done.returncode, check["status"]) == (1, "failed")
    assert "nothing can be loaded" in check["advice"]


def test_doctor_wants_a_folder_of_receipts(tree: Path, tmp_path: Path) -> None:
    done = run("doctor", "--registry", str(tree), "--json", CHORD_RECEIPTS=str(tmp_path / "nowhere"))
    (check,) = (check for check in json.loads(done.stdout) if check["what"] == "CHORD_RECEIPTS")
    assert (check["status"], "no folder" in check["found"]) == ("failed", True)


def test_qualify_says_what_it_cannot_do(tree: Path) -> None:
    refused = run("qualify", CHORD_REQUIRE_RECEIPT="1")
    assert (refused.returncode, "unset it to qualify" in refused.stderr) == (1, True)
    assert "--no-receipt contradicts" in " ".join(chord("qualify", "--no-receipt", "--key", "k", code=2).split())
