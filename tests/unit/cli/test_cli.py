"""The command line on a small tree: results on standard output, JSON on demand, exit status 1 for every failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import toytree
from chord.build import toolchain
from chord.build.tree import Tree
from chord.cli import doctor
from chord.cli._output import print_table

PROBLEM = ["width=64", "lanes=2", "kind=f32", "num_tokens=1", "block_m=8"]


def run(*words: object, without: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process that cannot import the module `without`."""
    start = "import sys; sys.modules[sys.argv.pop(1)] = None; from chord.cli import main; main()"
    command = [sys.executable, "-c", start, without, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def chord(*words: object, code: int = 0) -> str:
    done = run(*words)
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


@pytest.mark.parametrize(
    ("word", "says"),
    [("num_tokens=--5", "'--5' is not a whole number"), ("width=128", "width is given twice: 64 and 128")],
)
def test_a_problem_that_is_misspelt(tree: Path, word: str, says: str) -> None:
    words = [*PROBLEM[:3], "block_m=8", word] if word.startswith("num") else [*PROBLEM, word]
    done = run("lookup", "toy", *words, "--arch", "sm_90a", "--registry", tree)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize("arch", ["sm_90", "90a", "sm_100", "sm_100f", "sm_103", "SM_90A", ""])
def test_r08_architecture_names_are_strict(tree: Path, arch: str) -> None:
    for command in (
        ["lookup", "toy", *PROBLEM, "--registry", tree],
        ["build", "--root", tree],
        ["ls", "--registry", tree],
    ):
        refused = chord(*command, "--arch", arch, code=1)
        assert all(name in refused for name in toytree.ARCHS)


def test_coverage_shows_every_route(tree: Path) -> None:
    routes = json.loads(chord("coverage", "toy", "--arch", "sm_90a", "--registry", tree, "--json"))["toy"]["sm_90a"]
    assert {"where", "program", "ran_on"} == set(routes[0])
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


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_option_is_not_the_working_folder(value: str) -> None:
    """`--registry "$UNSET"` in a script must not take whatever lies in the folder that it runs in."""
    assert "error: --registry is empty: expected a path" in chord("ls", "--registry", value, code=1)
    assert "error: --root is empty: expected a checkout's folder" in chord("build", "--root", value, code=1)


@pytest.mark.parametrize("executor", ["", "cluster:8786", "dask://", "dask://host:99999"])
def test_an_executor_is_checked_even_where_nothing_is_compiled(tree: Path, executor: str) -> None:
    said = chord("build", "--root", tree, "--executor", executor, code=1)
    assert f"error: executor {executor!r}: expected dask://HOST:PORT" in said


def test_doctor_goes_on_where_the_store_cannot_be_listed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    _, checks = doctor._registry_checks(str(tree))
    assert [(c.what, c.status) for c in checks[:2]] == [("registry", "ok"), ("cubins", "failed")]
    assert "cannot list it: Permission denied" in checks[1].found


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_names_of_files_reach_no_terminal_as_they_are(tree: Path, encoding: str) -> None:
    """Escape sequences, line ends and bytes that are no UTF-8: shown, not obeyed, and no reason to stop."""
    stranger = os.fsencode(tree / "build/out/cubins") + b"/\xff\r\x1b[2Kgood.cubin\n9 cubins checked"
    Path(os.fsdecode(stranger)).touch()
    try:
        done = run("verify", "--registry", tree, PYTHONIOENCODING=encoding)
        found = json.loads(run("verify", "--registry", tree, "--json", PYTHONIOENCODING=encoding).stdout)
        listed = run("doctor", "--registry", tree, PYTHONIOENCODING=encoding)
    finally:
        Path(os.fsdecode(stranger)).unlink()
    assert done.returncode == 1
    assert "\\udcff\\r\\x1b[2Kgood.cubin\\n9 cubins checked: the manifest does not name it" in done.stdout
    assert not {"\r", "\x1b"} & set(done.stdout + done.stderr)
    assert found["unlisted"] == 1
    assert "\\udcff\\r\\x1b[2Kgood.cubin" in found["findings"][0]["message"]
    assert "1 unlisted" in " ".join(listed.stdout.split())


def test_verify_rebuild_compiles_everything_again(tree: Path) -> None:
    document = json.loads(chord("verify", "--rebuild", "--registry", tree, "--json"))
    assert (document["checked"], document["compiled"], document["differences"]) == (toytree.CUBINS, toytree.CUBINS, [])
    assert document["manifest_sha256"] in chord("verify", "--registry", tree)
    assert f"({toytree.CUBINS} compiled now): equal" in chord("verify", "--rebuild", "--registry", tree)


def test_verify_refuses_a_wrong_pin(tree: Path) -> None:
    assert "expects" in chord("verify", "--registry", tree, "--pin", "0" * 64, code=1)


def test_doctor_reports_registry_driver_compiler_and_settings(tree: Path) -> None:
    checks = {check["what"]: check for check in json.loads(chord("doctor", "--registry", tree, "--json"))}
    assert checks["registry"]["status"] == checks["cubins"]["status"] == checks["compiler"]["status"] == "ok"
    assert {"driver", "torch", "CHORD_REGISTRY", "CHORD_PIN"} <= set(checks)


def test_r23_a_build_honours_the_settings(tree: Path, tmp_path: Path) -> None:
    root = toytree.write(tmp_path / "tree")
    assert run("build", CHORD_REGISTRY=str(root)).returncode == 0
    digest = json.loads(chord("verify", "--registry", root, "--json"))["manifest_sha256"]
    for option in ("--check", "--locked"):
        assert run("build", option, CHORD_REGISTRY=str(root), CHORD_PIN=digest).returncode == 0
        refused = run("build", option, "--root", tree, CHORD_REGISTRY="/nowhere", CHORD_PIN="0" * 64)
        assert (refused.returncode, "CHORD_PIN expects" in refused.stderr) == (1, True)
    refused = run("build", "--root", root, CHORD_PIN=digest)
    assert (refused.returncode, "CHORD_PIN is set" in refused.stderr) == (1, True)


def test_a_pinned_build_without_a_manifest_says_so(tmp_path: Path) -> None:
    root = toytree.write(tmp_path / "tree")
    refused = run("build", "--locked", "--root", root, CHORD_PIN="0" * 64)
    assert (refused.returncode, f"CHORD_PIN is set: expected {root}/manifest.json" in refused.stderr) == (1, True)


@pytest.mark.parametrize("words", [["build"], ["build", "--check"]])
def test_a_folder_without_sources_is_left_alone(tmp_path: Path, words: list[str]) -> None:
    refused = run(*words, CHORD_REGISTRY=str(tmp_path))
    assert refused.returncode == 1
    assert f"error: {tmp_path} holds no sources" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("CHORD_PIN", "xyz"), ("CHORD_REGISTRY", " "), ("CHORD_REGISTRY", "/nonexistent"), ("CHORD_SM90_DECODE", "yes")],
)
def test_doctor_reports_a_setting_that_cannot_be_honoured(name: str, value: str) -> None:
    done = run("doctor", "--json", **{name: value})
    assert done.returncode == 1
    failed = {check["what"] for check in json.loads(done.stdout) if check["status"] == "failed"}
    assert failed == {"registry", name}


def test_doctor_lists_variables_that_nobody_knows(tree: Path) -> None:
    words, unknown = ["doctor", "--registry", tree], {"CHORD_PINN": "abc", "CHORD_DEBUG": "1"}
    checks = {check["what"]: check for check in json.loads(run(*words, "--json", **unknown).stdout)}
    assert {name: (checks[name]["status"], checks[name]["found"]) for name in unknown} == {
        name: ("unknown", value) for name, value in unknown.items()
    }
    assert checks["CHORD_PINN"]["advice"] == "did you mean CHORD_PIN?"
    assert checks["CHORD_DEBUG"]["advice"].startswith("known are CHORD_EP_ROWS, CHORD_HUMMING, ")
    assert "did you mean CHORD_PIN?" in run(*words, **unknown).stdout
    assert run(*words, **unknown).returncode == 0
    assert run(*words, "--strict", **unknown).returncode == 1


def test_doctor_reports_a_compiler_with_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = toolchain.load(Tree.default().toolchain)
    libraries = {system: dict.fromkeys(files, "0" * 64) for system, files in pin.libraries.items()}
    monkeypatch.setattr(toolchain, "load", lambda path: msgspec.structs.replace(pin, libraries=libraries))
    check = doctor._compiler_check()
    assert (check.status, "expected SHA-256 000" in check.found) == ("failed", True)


def test_a_warning_that_is_an_error_is_one_line(tree: Path) -> None:
    done = run("ls", "--registry", tree, CHORD_PINN="abc", PYTHONWARNINGS="error")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: CHORD_PINN is not a variable that chord knows, and has no effect; did you mean CHORD_PIN?\n"
    )


def test_messages_name_the_option_and_the_checkout(tree: Path, tmp_path: Path) -> None:
    assert run("ls", "--registry", tmp_path).stderr.startswith(f"error: --registry: expected a registry in {tmp_path}")
    assert f"in {tree} (from --registry)" in chord("ls", "--registry", tree)
    assert "(from the checkout)" in chord("ls")


def test_a_build_into_a_pipe_prints_its_result_alone(tmp_path: Path) -> None:
    done = run("build", "--root", toytree.write(tmp_path))
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)


def test_an_interrupted_build_says_so_in_one_line(tmp_path: Path) -> None:
    root = toytree.write(tmp_path)
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from chord.cli import main; main()"
    )
    words = [sys.executable, "-c", start, "build", "--root", str(root), "-j", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(root.glob("build/out/work/[0-9a-f]*")):  # one that is finished, not one that is being written
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error == "interrupted; finished cubins are kept for the next build\n"
    assert not (root / "manifest.json").exists()
    assert json.loads(chord("build", "--root", root, "--json"))["reused"] >= 1


def test_doctor_says_which_variables_select_no_kernel(tree: Path) -> None:
    done = run("doctor", "--registry", tree, "--json", CHORD_SM90_DECODE="1", CHORD_USE_GROUPED="0")
    checks = {check["what"]: check for check in json.loads(done.stdout)}
    assert (checks["CHORD_SM90_DECODE"]["found"], checks["CHORD_USE_GROUPED"]["found"]) == ("1", "0")
    assert "nothing else: one layout serves both phases" in checks["CHORD_SM90_DECODE"]["advice"]
    assert done.stderr.count("selects no kernel") == 2


def test_tables_show_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("routes [measured]", ("advice",), [["pip install 'chord-registry[torch]'"]])
    shown = capsys.readouterr().out
    assert "routes [measured]" in shown
    assert "pip install 'chord-registry[torch]'" in shown


@pytest.mark.parametrize("module", ["jinja2", *(["tomli"] if sys.version_info < (3, 11) else [])])
def test_doctor_works_without_what_only_a_build_needs(tree: Path, module: str) -> None:
    done = run("doctor", "--registry", tree, "--json", without=module)
    assert done.returncode == 0, done.stderr
    checks = {check["what"]: check for check in json.loads(done.stdout)}
    assert checks["compiler"]["status"] == "missing"
    assert "chord-registry[build]" in checks["compiler"]["found"]


@pytest.mark.parametrize(
    ("words", "without", "extra"),
    [
        (["build", "--check"], "jinja2", "build"),
        (["verify", "--rebuild"], "jinja2", "build"),
        (["bench", "docs"], "torch", "torch"),
        (["tune", "router"], "tomlkit", "dev"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(tree: Path, words: list[str], without: str, extra: str) -> None:
    place = {"build": ["--root", tree], "verify": ["--registry", tree]}.get(words[0], [])
    done = run(*words, *place, without=without)
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: this command needs {without}: pip install 'chord-registry[{extra}]'"


def test_a_broken_template_fails_with_place_and_log(tmp_path: Path) -> None:
    root = toytree.write(tmp_path)
    toytree.edit(root, "templates/toy/single.cu.j2", "toy::scale(threadIdx.x, factor)", "missing_name")
    refused = chord("build", "--root", root, code=1)
    assert "missing_name" in refused
    assert "toy.single.w64.l2.f32.t1.bm8" in refused
    assert not (root / "manifest.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "router"],
        ["bench", "host"],
        ["bench", "w4a16"],
        ["bench", "layer"],
        ["tune", "router"],
        ["tune", "w4a16"],
        ["qualify"],
    ],
)
def test_commands_for_a_gpu_say_what_they_miss(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "chord.cli", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "this command needs" in done.stderr
    assert list(tmp_path.iterdir()) == []
