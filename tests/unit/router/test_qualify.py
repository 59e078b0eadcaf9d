"""What qualification tries, with the CPU's reference in the place of kernels."""

from __future__ import annotations

import pytest
import torch

from chord.checks import qualify, router
from chord.checks.inputs import mixed_batch, normal_case
from chord.checks.router import Settings
from chord.registry import Registry
from chord.router import prepare_fused_router

CPU = torch.device("cpu")
PROGRAMS = Registry.open().programs("fused_router", "sm_90a")
FEW = {name: p for name, p in PROGRAMS.items() if p.num_tokens is None and (p.limit("num_tokens") or 99) <= 32}


@pytest.fixture
def stand_in(monkeypatch):
    """The reference runs for every program; `faulty` ones spoil the first weight afterwards."""
    faulty = set()

    class Prepared:
        def __init__(self, case, settings, buffers, program):
            arguments = {**settings._asdict(), **buffers._asdict()}
            self.run = prepare_fused_router(case.logits, case.bias, top_k=case.top_k, **arguments)
            self.weights, self.program = buffers.topk_weights, program

        def __call__(self):
            self.run()
            if self.program in faulty and self.weights.numel():
                self.weights[0, 0] += 1e-3

    monkeypatch.setattr(
        router, "prepared_on", lambda case, settings, buffers, name=None: Prepared(case, settings, buffers, name)
    )
    return faulty


@pytest.mark.parametrize("name", sorted(FEW)[::5])
def test_programs_for_few_tokens_are_tried_with_every_count(name):
    program = FEW[name]
    trials = list(qualify.router_trials(program, CPU))
    counts = {trial.case.logits.shape[0] for trial in trials}
    assert counts == set(range(program.limit("num_tokens") + 1))
    graphs = {trial.case.logits.shape[0] for trial in trials if trial.graph}
    assert graphs == {program.limit("num_tokens")}
    assert {trial.settings.local_experts is None for trial in trials} == {True, False}
    hostile = {trial.case.name.rpartition("_")[0] for trial in trials} - {"normal", "mixed"}
    assert hostile
    for trial in trials:
        assert trial.settings.block_m == (program.block_m or 40)


def test_given_counts_are_kept_to(stand_in):
    program = FEW[min(FEW)]
    assert {t.case.logits.shape[0] for t in qualify.router_trials(program, CPU, (2, 5, 999))} == {2, 5}
    assert {t.case.logits.shape[0] for t in qualify.tiny_trials(program, (2, 5, 999))} == {2, 5}
    exact = next(program for program in PROGRAMS.values() if program.num_tokens == 4)
    assert {t.case.logits.shape[0] for t in qualify.router_trials(exact, CPU)} == {4}
    assert any(t.graph for t in qualify.router_trials(exact, CPU))


def test_tiny_trials_run_and_are_judged_on_the_host(stand_in):
    program = PROGRAMS["fused_router.few32.e384.k8.bf16.bm8"]
    trials, known = list(qualify.tiny_trials(program)), qualify._Known()
    assert [problem for trial in trials for problem in qualify._run(trial, "p", CPU, known)] == []
    stand_in.add("p")
    problems = [problem for trial in trials for problem in qualify._run(trial, "p", CPU, known)]
    assert any("topk_weights" in problem for problem in problems)


def test_tiny_trials_have_ties_at_the_boundary():
    """Equal scores at the K-th place, too few for the exact path: a branch that only such rows take."""
    program = PROGRAMS["fused_router.few32.e384.k8.bf16.bm8"]
    case = next(qualify.tiny_trials(program, brief=True)).case
    ranked = (case.logits.float().sigmoid() + case.bias).sort(dim=1, descending=True).values
    equal = (ranked == ranked[:, 7:8]).sum(1)
    assert ((ranked[:, 7] == ranked[:, 8]) & (equal < 32)).any()


def test_programs_are_held_against_one_that_was_right(stand_in):
    stand_in.update({"wrong", "late"})
    case = mixed_batch(9, 384, torch.float32, CPU)
    settings = Settings(8, local_experts=range(48))
    assert router.compare_programs(case, settings, ["a", "b"]) == []
    problems = router.compare_programs(case, settings, ["wrong", "a", "late"])
    assert len(problems) == 2
    assert "wrong: topk_weights[0, 0]: expected" in problems[0]
    assert "late: the bits of topk_weights differ from those of a program that was right" in problems[1]


def test_a_case_from_the_host_leaves_nothing_unwritten(stand_in):
    case, settings = normal_case(7, 896, torch.float32, CPU), Settings(16, local_experts=range(112, 224))
    written = router.run_from_host(case, settings, CPU, launches=2)
    assert router.router_problems(case, settings, written) == []


def test_patterns():
    assert qualify.matches("fused_router.few.x", "route_plan,fused_router.few.*")
    assert not qualify.matches("fused_router.few8.x", "route_plan,fused_router.few.*")


def test_outputs_that_were_right_are_not_judged_twice(stand_in, monkeypatch):
    """Programs that share a case are compared by bits; other bits are held against the reference all the same."""
    judged = []
    monkeypatch.setattr(
        qualify, "router_problems", lambda *given: judged.append(given) or router.router_problems(*given)
    )
    monkeypatch.setattr(qualify, "run_prepared", lambda *given: router.run_from_host(*given[:2], CPU, *given[2:]))
    exact = next(program for program in PROGRAMS.values() if program.num_tokens == 4)
    trials, known = [trial._replace(graph=False) for trial in qualify.router_trials(exact, CPU)], qualify._Known()
    assert [qualify._run(trial, name, CPU, known) for name in ("a", "b") for trial in trials] == [[]] * 2 * len(trials)
    assert len(judged) == len(trials) == 3
    stand_in.add("c")
    assert all(any("topk_weights[0, 0]" in p for p in qualify._run(trial, "c", CPU, known)) for trial in trials)
    assert len(judged) == 3 * len(trials), "both runs of each trial"


def test_seconds_add_up(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr(qualify.time, "perf_counter", lambda: next(now))
    clock = qualify.Seconds()
    for name in ("a", "b"):
        with clock.of(name):
            pass
    assert clock.shares(["a", "b"]) == {"a": 6.0, "b": 4.0}
