"""The sanitizer's jobs: every arm is in one for each tool; what they print is judged, silence is no pass."""

from __future__ import annotations

import sys

import pytest

from chord.checks import qualify, sanitize
from chord.checks.sanitize import Job, Outcome
from chord.registry import Registry

OPERATORS = Registry.open().manifest.operators


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_arm_is_covered_by_every_tool(arch):
    want = {
        (operator, program.arm)
        for operator, definition in OPERATORS.items()
        for program in definition.programs.values()
        if arch in program.builds
    }
    plan = sanitize.jobs(OPERATORS, arch)
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        names = [name for job in plan if job.tool == tool for name in job.programs]
        found = {(name.partition(".")[0], OPERATORS[name.partition(".")[0]].programs[name].arm) for name in names}
        assert found == want
        assert len(names) == len(set(names))
    assert len({job.name for job in plan}) == len(plan), "each has a log of its own"


def test_router_jobs_are_small_and_unlike():
    router = OPERATORS["fused_router"].programs
    for job in sanitize.jobs(OPERATORS, "sm_90a"):
        if job.arm.startswith("fused_router."):
            first, second = (router[name] for name in job.programs)
            assert (first.constants["num_experts"], first.constants["logits"]) == (896, "f32")
            assert (second.constants["num_experts"], second.constants["logits"]) == (384, "bf16")
            trials = [trial for name in job.programs for trial in qualify.tiny_trials(router[name], job.counts)]
            assert 0 < len(trials) <= 12
            assert max(trial.case.logits.shape[0] for trial in trials) <= 130
            assert all(trial.case.logits.device.type == "cpu" for trial in trials)
            limit = first.limit("num_tokens")
            if first.num_tokens is None and limit is not None and limit <= 64:
                assert limit in {trial.case.logits.shape[0] for trial in trials}


def test_commands_instrument_chords_kernels_alone():
    job = Job("racecheck", "fused_router.few32", ("fused_router.few32.e384.k8.bf16",), (17, 32))
    words = sanitize.command(job, "/bin/cs")
    assert words[:5] == ["/bin/cs", "--tool", "racecheck", "--racecheck-report", "all"]
    assert words[words.index("--kernel-name") + 1] == "kernel_substring=fused_router"
    assert words[words.index("--report-api-errors") + 1] == "no"
    assert words[-8:] == [
        sys.executable, "-m", "chord.checks", "--tiny", "--only", job.programs[0], "--counts", "17,32",
    ]  # fmt: skip
    for program in job.programs:
        assert any(
            symbol.symbol.startswith("fused_router") for symbol in OPERATORS["fused_router"].programs[program].kernels
        )


CLEAN = "ok     p on sm_90a, 6 cases\nok     q on sm_90a, 4 cases\n2 programs, 0 failed\n"


@pytest.mark.parametrize(
    ("log", "outcome"),
    [
        (CLEAN + "========= ERROR SUMMARY: 0 errors\n", Outcome(10, 0, 0, 0)),
        (CLEAN + "========= ERROR SUMMARY: 1 error\n", Outcome(10, 0, 1, 0)),
        (
            CLEAN + "========= RACECHECK SUMMARY: 5 hazards displayed (2 errors, 3 warnings)\n",
            Outcome(10, 0, 0, 5),
        ),
        (CLEAN, Outcome(10, 0, 0, 0, "no summary of the tool")),
        ("========= ERROR SUMMARY: 0 errors\n", Outcome(0, 0, 0, 0, "the checks did not end")),
        (
            "0 programs, 0 failed\n========= ERROR SUMMARY: 0 errors\n",
            Outcome(0, 0, 0, 0, "expected 2 programs to run, got 0"),
        ),
        (
            "FAILED p on sm_90a, 6 cases\nok     q on sm_90a, 4 cases\n2 programs, 1 failed\n= ERROR SUMMARY: 0 errors",
            Outcome(10, 1, 0, 0),
        ),
    ],
)
def test_logs_are_judged(log, outcome):
    found = sanitize.judge(Job("memcheck", "a", ("p", "q"), ()), log)
    assert found == outcome
    assert found.clean == (log == CLEAN + "========= ERROR SUMMARY: 0 errors\n")


def test_jobs_run_with_a_log_and_an_end(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\nprintf '{CLEAN}'\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    job = Job("memcheck", "a", ("p", "q"), ())
    done = sanitize.run(job, str(tool), tmp_path, 60)
    assert done[:2] == (job, Outcome(10, 0, 0, 0))
    assert "2 programs" in (tmp_path / "memcheck-a.log").read_text()
    tool.write_text("#!/bin/sh\nsleep 60 & wait\n")
    late = sanitize.run(job, str(tool), tmp_path, 0.3)
    assert late[1].broken == "ended after 0 s"
    assert late[2] < 10
    lines = sanitize.table([done, late]).splitlines()
    assert lines[1].split()[:5] == ["memcheck-a", "10", "0", "0", "0"]
    assert lines[2].endswith("ended after 0 s")
    assert lines[3] == "2 jobs, 10 cases, 1 jobs not clean"


def test_lists_need_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sanitize", "--list", "--arch", "sm_90a", "--only", "racecheck-route_plan.*"])
    assert sanitize.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(sys, "argv", ["sanitize", "--list", "--arch", "sm_90a", "--only", "nothing"])
    assert sanitize.main() == 2


TOOL = """#!/bin/sh
for word; do [ "$last" = --only ] && only=$word; last=$word; done
echo "ok     p on sm_90a, 4 cases"
echo "$(echo "$only" | tr , '\\n' | wc -l) programs, 0 failed"
case "$*" in *"$BAD"*) echo "========= ERROR SUMMARY: 3 errors" ;; *) echo "========= ERROR SUMMARY: 0 errors" ;; esac
"""


@pytest.mark.parametrize(("bad", "status"), [("nothing", 0), ("route_plan.large", 1)])
def test_the_whole_run_ends_with_a_table_and_a_status(tmp_path, monkeypatch, capsys, bad, status):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("BAD", bad)
    monkeypatch.setattr(sanitize, "_present_arch", lambda: "sm_90a")
    monkeypatch.setattr(sys, "argv", ["sanitize", "--out", str(tmp_path / "logs"), "--only", "*-route_plan.*"])
    assert sanitize.main() == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"8 jobs, 32 cases, {4 * status} jobs not clean"
    assert len(list((tmp_path / "logs").iterdir())) == 8
    monkeypatch.setattr(sanitize, "_present_arch", lambda: "")
    assert sanitize.main() == 2
