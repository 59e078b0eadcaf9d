"""Several processes give the verdicts that one gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chord import _runtime
from chord.checks import shards
from chord.checks.qualify import Verdict
from chord.errors import ChordError


def programs():
    return _runtime.registry().programs(arch="sm_90a")


def test_every_program_is_in_one_shard():
    split = shards.shards(programs())
    assert sorted(name for names in split for name in names) == sorted(programs())
    assert all(len(names) <= shards.ROUTER_PROGRAMS for names in split if names[0].startswith("fused_router"))
    assert {n.partition(".")[0] for n in next(s for s in split if "pack" in s[0])} == {"w4a16_pack", "w4a16_unpack"}


def test_only_what_is_meant():
    assert [n for s in shards.shards(programs(), "route_plan") for n in s] == sorted(
        name for name in programs() if name.startswith("route_plan.")
    )
    assert shards.shards(programs(), "nothing.*") == []


@pytest.fixture
def child(monkeypatch):
    """What each process would do: here one that notes its words and hands verdicts back."""
    ran = []

    def run(command, **_options):
        ran.append(command)
        words = dict(zip(command[3::2], command[4::2], strict=False))
        found = [Verdict(name, "sm_90a", "0" * 64, 2, []) for name in words["--only"].split(",")]
        if run.verdicts:
            shards.write_verdicts(found, Path(words["--verdicts"]))
        return subprocess.CompletedProcess(command, 0 if run.verdicts else 3, "", "out of memory")

    run.verdicts, run.commands = True, ran
    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(shards.subprocess, "run", run)
    return run


def test_verdicts_come_back_in_order(child):
    shown = []
    found = shards.qualify_in_processes(0, 3, only="fused_router.*,route_plan.*", progress=shown.append)
    wanted = [name for name in programs() if name.startswith(("fused_router.", "route_plan."))]
    assert [verdict.program for verdict in found] == sorted(wanted)
    assert sorted(shown) == found
    assert all(command[:3] == [sys.executable, "-m", "chord.checks"] for command in child.commands)


def test_a_process_that_fails_is_no_verdict(child):
    child.verdicts = False
    with pytest.raises(ChordError, match="ended with 3: out of memory"):
        shards.qualify_in_processes(0, 2, only="route_plan.*")
