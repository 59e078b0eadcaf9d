"""Several processes give the verdicts that one gives."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from chord import _runtime
from chord.checks import shards
from chord.errors import ChordError


def programs():
    return _runtime.registry().programs(arch="sm_90a")


def test_every_program_is_in_one_shard_with_those_that_share_its_inputs():
    split = shards.shards(programs())
    assert sorted(name for names in split for name in names) == sorted(programs())
    operators = [{name.partition(".")[0] for name in names} for names in split]
    assert operators[:4] == [{name} for name in shards.FIRST[:4]]
    assert all(len(found) == 1 for found in operators[:-1])
    assert {"route_plan", "moe_combine", "w4a16_pack", "w4a16_unpack"} <= operators[-1]
    router = [names for names in split if names[0].startswith("fused_router")]
    kinds = [
        {tuple(programs()[n].constants[key] for key in ("num_experts", "logits")) for n in names} for names in router
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert len({next(iter(kind)) for kind in kinds}) == len(router) == 4


def test_only_what_is_meant():
    assert [n for s in shards.shards(programs(), "route_plan") for n in s] == sorted(
        name for name in programs() if name.startswith("route_plan.")
    )
    assert shards.shards(programs(), "nothing.*") == []


CHILD = """
import os, sys, time
from chord.checks import shards
from chord.checks.qualify import Verdict
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("a library's greeting")
for name in words["--only"].split(","):
    print(shards.encode(Verdict(name, "sm_90a", "0" * 64, 2, [], 1.5)), flush=True)
print(os.environ["OMP_NUM_THREADS"], file=sys.stderr)
{rest}
"""


@pytest.fixture
def child(monkeypatch):
    """Sets how the processes go on once they have handed their verdicts over; notes how they are started."""
    commands, popen = [], subprocess.Popen

    def use(rest=""):
        def start(command, **options):
            commands.append(command)
            return popen([sys.executable, "-c", CHILD.format(rest=rest), *command[4:]], **options)

        monkeypatch.setattr(shards.subprocess, "Popen", start)

    use.commands = commands
    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    return use


def test_verdicts_come_back_in_order(child):
    child()
    shown = []
    found = shards.qualify_in_processes(0, 3, only="fused_router.*f32*,route_plan.*", progress=shown.append)
    assert [verdict.program for verdict in found] == sorted(
        name for name in programs() if name.startswith("route_plan.") or (name.startswith("fused_") and "f32" in name)
    )
    assert sorted(shown) == found
    assert {verdict.seconds for verdict in found} == {1.5}
    assert all(command[:4] == [sys.executable, "-m", "chord.checks", "--verdicts"] for command in child.commands)


def test_a_process_that_fails_is_named_when_the_others_are_done(child):
    child("if 'route_plan' in words['--only']: print('out of memory', file=sys.stderr); sys.exit(3)\ntime.sleep(1)")
    shown = []
    with pytest.raises(ChordError, match=r"checking route_plan\.\w+, .* ended with 3: (?s:.*)out of memory"):
        shards.qualify_in_processes(0, 2, only="route_plan.*,moe_w4a16.*", progress=shown.append)
    wanted = [name for name in programs() if name.startswith(("route_plan.", "moe_w4a16."))]
    assert sorted(verdict.program for verdict in shown) == wanted


def test_verdicts_are_told_at_once_and_processes_end_with_the_run(child):
    """The first verdict is heard while its process goes on; what that raises ends every process."""
    child("time.sleep(600)")

    def interrupted(_verdict):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        shards.qualify_in_processes(0, 2, only="route_plan.*,moe_w4a16_masked.*,moe_w4a16.*", progress=interrupted)
    assert time.monotonic() - start < 60
