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


def test_few_processes_and_the_slow_ones_first():
    plan = sanitize.jobs(OPERATORS, "sm_90a")
    assert [job.name for job in plan[: len(sanitize.SLOWEST)]] == list(sanitize.SLOWEST)
    assert len(plan) <= 32, "a process takes seconds to start"


def test_router_jobs_are_small_and_unlike():
    router = OPERATORS["fused_router"].programs
    for job in sanitize.jobs(OPERATORS, "sm_90a"):
        if job.what.startswith("fused_router."):
            first, second = (router[name] for name in job.programs)
            assert (first.constants["num_experts"], first.constants["logits"]) == (896, "f32")
            assert (second.constants["num_experts"], second.constants["logits"]) == (384, "bf16")


@pytest.mark.parametrize("brief", [False, True])
def test_tiny_trials_are_few_and_lie_on_the_host(brief):
    limits = set()
    for program in Registry.open().programs("fused_router", "sm_90a").values():
        trials = list(qualify.tiny_trials(program, brief=brief))
        counts = {trial.case.logits.shape[0] for trial in trials}
        limit = program.limit("num_tokens")
        limits.add(limit)
        assert len(trials) == 2 * len(counts) <= (2 if brief else 6)
        assert {trial.launches for trial in trials} == {(1,) if brief else (2,)}
        assert max(counts) <= 130
        assert all(trial.case.logits.device.type == "cpu" for trial in trials)
        if program.num_tokens is None and limit is not None and limit <= 64:
            assert limit in counts
    assert len(limits) > 4


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
        (CLEAN, Outcome(10, 0, 0, 0, (), "no summary of the tool")),
        ("========= ERROR SUMMARY: 0 errors\n", Outcome(0, 0, 0, 0, (), "the checks did not end")),
        (
            "0 programs, 0 failed\n========= ERROR SUMMARY: 0 errors\n",
            Outcome(0, 0, 0, 0, (), "expected 2 programs to run, got 0"),
        ),
        (
            "FAILED p on sm_90a, 6 cases\nok     q on sm_90a, 4 cases\n2 programs, 1 failed\n= ERROR SUMMARY: 0 errors",
            Outcome(10, 1, 0, 0),
        ),
    ],
)
def test_logs_are_judged(log, outcome):
    found = sanitize.judge(Job("memcheck", "a", ("p", "q")), log)
    assert found == outcome
    assert found.clean == (log == CLEAN + "========= ERROR SUMMARY: 0 errors\n")


def test_findings_name_their_kernels():
    log = """========= Error: Race reported between Write access at moe_w4a16_mma_r32+0x85f0
=========     and Read access at moe_w4a16_mma_r32+0xeda0 [4 hazards]
========= Invalid __global__ read of size 4 bytes
=========     at fused_router_solo+0x10
=========     by thread (1,0,0) in block (0,0,0)
========= ERROR SUMMARY: 2 errors
"""
    job = Job("memcheck", "a", ("p", "q"))
    found = sanitize.judge(job, CLEAN + log)
    assert found.kernels == ("fused_router_solo", "moe_w4a16_mma_r32")
    assert sanitize.table([(job, found, 1.0)]).splitlines()[1].endswith("fused_router_solo, moe_w4a16_mma_r32")


def test_jobs_run_with_a_log_and_an_end(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\nprintf '{CLEAN}'\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    job = Job("memcheck", "a", ("p", "q"))
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
    words = ["sanitize", "--list", "--arch", "sm_90a", "--only"]
    monkeypatch.setattr(sys, "argv", [*words, "racecheck-fused_router.few8"])
    assert sanitize.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setattr(sys, "argv", [*words, "nothing"])
    assert sanitize.main() == 2
    assert "--only: expected a pattern of some job, got 'nothing'; there are racecheck-" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["sanitize", "--list", "--arch", "sm_80"])
    assert sanitize.main() == 2
    assert "there are none for sm_80; `chord ls` shows the architectures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--jobs", "0"], "--jobs: expected at least 1, got 0"), (["--arch", "sm_90a"], "--arch: expected with --list")],
)
def test_options_that_cannot_be_honoured_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sanitize", *words])
    with pytest.raises(SystemExit):
        sanitize.main()
    assert message in capsys.readouterr().err


TOOL = """#!/bin/sh
for word; do [ "$last" = --only ] && only=$word; last=$word; done
echo "ok     p on sm_90a, 4 cases"
echo "$(echo "$only" | tr , '\\n' | wc -l) programs, 0 failed"
case "$*" in *"$BAD"*) echo "========= ERROR SUMMARY: 3 errors" ;; *) echo "========= ERROR SUMMARY: 0 errors" ;; esac
"""


@pytest.mark.parametrize(("bad", "status"), [("nothing", 0), ("moe_w4a16_masked.wgmma_r32", 1)])
def test_the_whole_run_ends_with_a_table_and_a_status(tmp_path, monkeypatch, capsys, bad, status):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("BAD", bad)
    monkeypatch.setattr(sanitize, "_present_arch", lambda: "sm_90a")
    monkeypatch.setattr(sys, "argv", ["sanitize", "--out", str(tmp_path / "logs"), "--only", "*-moe_w4a16*"])
    assert sanitize.main() == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"12 jobs, 48 cases, {4 * status} jobs not clean"
    assert len(list((tmp_path / "logs").iterdir())) == 12
    monkeypatch.setattr(sanitize, "_present_arch", lambda: "")
    assert sanitize.main() == 2
