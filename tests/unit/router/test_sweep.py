"""What a sweep measures and leaves out, with a stand-in for the GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chord import _runtime
from chord.bench import stats, timing
from chord.bench.results import Results
from chord.registry import Registry
from chord.router import prepare_fused_router
from chord.tune import router, sweep, w4a16
from chord.tune.tuning import Tuning, results_path, write_tuned

PROGRAMS = Registry.open().programs("fused_router", "sm_90a")
ARMS = {
    "solo": "fused_router.solo.e896.k16.f32.t1.bm8",
    "spread": "fused_router.spread.e896.k16.f32.bm8",
    "wide": "fused_router.wide.e896.k16.f32.bm8",
    "general": "fused_router.general.e896.k16.f32",
}
ONE_CLASS = router.Part((896,), (8,))
LIMITS = {"spread": 32, "wide": 512}


def microseconds(arm, tokens):
    """Small ones rise early, `general` begins slow and ends best."""
    return {"solo": 2.0, "spread": 2.5 + tokens / 8, "wide": 3.5 + tokens / 60, "general": 9.0 + tokens / 2000}[arm]


class FakeBench:
    """Times by formula. wrong: (arm, count) from which on an arm gives wrong results."""

    def __init__(self, *given, wrong=(), untimed=(), lost=None, ticks=None):
        self.wrong, self.untimed, self.lost, self.ticks = dict(wrong), untimed, lost, ticks
        self.timed = {}

    def arms(self, count):
        admitted = [arm for arm in ARMS if count <= LIMITS.get(arm, count) and (arm != "solo" or count == 1)]
        return {arm: PROGRAMS[ARMS[arm]] for arm in admitted}

    def time(self, count, arms):
        if count == self.lost:
            raise sweep.GpuLostError("fused_router.wide left the CUDA context unusable")
        if count in self.untimed:
            raise sweep.NotTimedError("events were lost")
        self.timed[count] = list(arms)
        wrong = {arm: "its ids are wrong" for arm in arms if count >= self.wrong.get(arm, count + 1)}
        return {arm: [microseconds(arm, count)] * 3 for arm in arms if arm not in wrong}, wrong

    def row(self, count, arm, summary, arch):
        from chord.bench.results import Row

        return Row(scenario="tune_k3", tokens=count, program=ARMS[arm], us=summary.median)


def swept(counts=router.TOKEN_COUNTS, **options):
    bench, said = FakeBench(**options), []
    measured = sweep.Sweep(counts, bench, said.append)
    for count in measured.counts:
        measured.measure(count)
    return bench, measured, said


def test_the_coarse_grid_comes_first():
    order = sweep.in_order(router.TOKEN_COUNTS)
    assert order[:9] == [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]
    assert sorted(order) == sorted(router.TOKEN_COUNTS)
    assert sweep.coarse([3, 5, 48]) == [3, 48]


def test_a_thin_grid_keeps_few_tokens_and_the_coarse_grid():
    few = sweep.thin(router.TOKEN_COUNTS)
    assert {count for count in router.TOKEN_COUNTS if count <= 32} <= set(few)
    assert set(sweep.coarse(router.TOKEN_COUNTS)) <= set(few)
    assert len(few) < 0.8 * len(router.TOKEN_COUNTS)


def test_counts_up_to_a_size_end_with_it():
    assert sweep.up_to([1, 4, 16, 64], 20) == [1, 4, 16, 20]
    assert sweep.up_to([4, 1], None) == [1, 4]


def test_slow_arms_are_left_out_in_between_only():
    bench, measured, said = swept()
    assert set(bench.timed[1]) == set(ARMS)
    assert "general" in bench.timed[4]
    assert "general" not in bench.timed[3]
    assert "general" not in bench.timed[12]
    assert "general" in bench.timed[512]
    assert said == []
    best = {interval.arm for interval in measured.intervals(0, 1 << 20, 0.03)}
    assert best == {"solo", "spread", "wide", "general"}


@given(
    st.dictionaries(
        st.sampled_from(router.TOKEN_COUNTS), st.dictionaries(st.sampled_from("abc"), st.floats(1, 9), min_size=1)
    )
)
def test_what_is_left_out_was_slow_at_two_counts_of_the_grid(times):
    grid = sweep.coarse(router.TOKEN_COUNTS)
    for count in router.TOKEN_COUNTS:
        for arm in "abc":
            if sweep.hopeless(arm, count, times, grid):
                assert count not in grid
                slow = [n for n in grid if arm in times.get(n, {}) and times[n][arm] > 1.6 * min(times[n].values())]
                assert len(slow) >= 2


def test_before_its_limit_an_arm_is_judged_by_the_last_two_counts():
    times = {4: {"a": 9.0, "b": 1.0}, 16: {"a": 9.0, "b": 1.0}, 64: {"b": 1.0}}
    assert sweep.hopeless("a", 24, times, [4, 16, 64])
    times[4]["a"] = 1.5
    assert not sweep.hopeless("a", 24, times, [4, 16, 64])
    assert not sweep.hopeless("new", 24, times, [4, 16, 64])


def test_a_wrong_arm_is_reported_once_and_takes_no_route():
    bench, measured, said = swept(wrong={"wide": 64})
    assert said == ["wide is left out from 64 on: its ids are wrong"]
    assert all(
        "wide" not in arms
        for count, arms in bench.timed.items()
        if sweep.in_order(router.TOKEN_COUNTS).index(count) > 3
    )
    assert "wide" not in {interval.arm for interval in measured.intervals(0, 1 << 20, 0.03)}


def test_a_count_that_cannot_be_timed_is_reported():
    _, measured, said = swept(untimed=(300,))
    assert said == ["300 is left out: events were lost"]
    assert measured.intervals(0, 1 << 20, 0.03)


def test_attempts_name_what_failed_and_stop_when_the_gpu_is_lost():
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    assert sweep.attempt("p", lambda: 3, lambda: None) == (3, "")
    assert sweep.attempt("p", fail, lambda: None) == (None, "CUDA error: an illegal memory access")
    with pytest.raises(sweep.GpuLostError, match=r"^p left the CUDA context unusable \(CUDA error: an illegal"):
        sweep.attempt("p", lambda: 3, fail)


def test_budgets():
    now = [0.0]
    budget = sweep.Budget(5, clock=lambda: now[0])
    assert not budget.spent()
    now[0] = 5.0
    assert budget.spent()
    assert not sweep.Budget(None).spent()


def test_parts():
    assert len(router.Part().classes()) == 6
    assert router.Part((384,), (128, 8)).classes() == [
        (384, router.BLOCK_M_CLASSES[0]),
        (384, router.BLOCK_M_CLASSES[2]),
    ]
    for part, message in (
        (router.Part((512,)), "experts: expected some of"),
        (router.Part(block_m=(12,)), "block_m: expected multiples of 8"),
        (router.Part(max_tokens=0), "max_tokens: expected 1 to"),
    ):
        with pytest.raises(ValueError, match=message):
            part.classes()


@pytest.fixture
def tuner(monkeypatch):
    """`tune` with stand-ins; returns a function of the bench's options and the part."""
    empty = Results(
        suite="router", date="2026-12-01", gpu="NVIDIA H200", driver="", torch="", commit="", peers={}, method="",
        flush="read", steady_ms=1, rows=[],
    )  # fmt: skip
    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(router.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(router, "describe_run", lambda *given: empty)
    monkeypatch.setattr(router, "ColdTimer", lambda steady_ms: None)

    def run(part=ONE_CLASS, limit_s=None, **options):
        monkeypatch.setattr(router, "RouterBench", lambda *given: FakeBench(**options))
        saved = []
        found = router.tune(part, limit_s=limit_s, save=lambda results: saved.append(len(results.rows)))
        return found, saved

    return run


def test_a_whole_sweep_gives_boxes_and_saves_after_each_count(tuner):
    found, saved = tuner()
    assert (found.stopped, found.problems, found.lost) == ("", [], False)
    assert len(saved) == len(router.TOKEN_COUNTS)
    assert saved[-1] == len(found.results.rows)
    [box] = found.boxes
    assert (box.ranges, box.only) == ({"block_m": (8, 8)}, {"num_experts": [896]})
    assert (box.intervals[0].first, box.intervals[-1].last) == (0, 1 << 20)


def test_a_part_ends_at_its_last_count(tuner):
    found, _ = tuner(router.Part((896,), (8,), 50))
    assert max(row.tokens for row in found.results.rows) == 50
    assert found.boxes[0].intervals[-1].last == 50


def test_what_was_measured_survives_an_early_end(tuner, tmp_path):
    found, saved = tuner(limit_s=0)
    assert (found.stopped, found.boxes, saved) == ("the time limit is over", [], [])
    found, saved = tuner(router.Part((896,)), lost=24)
    assert found.lost
    assert "fused_router.wide left the CUDA context" in found.stopped
    assert saved
    assert found.boxes == []
    path = write_tuned(found, tmp_path, tmp_path / "absent.toml")
    assert path.name == "2026-12-01-h200-router-tune.json"
    assert path == results_path(found.results, tmp_path)
    assert path.exists()


def test_a_class_without_routes_is_reported(tuner):
    found, _ = tuner(wrong={"general": 1})
    assert found.boxes == []
    assert found.problems[0] == "896 experts, block_m 8: general is left out from 1 on: its ids are wrong"
    assert "no routes" in found.problems[1]


def test_numbers_of_kernels_that_are_known_are_not_counted(monkeypatch):
    """One session of the profiler for all subjects, unless one of them must be counted."""
    sessions = []

    def profile(call):
        sessions.append(call)
        call()
        return [timing.Span(float(place), place + 1.0) for place in range(len(done))]

    done = []
    timer = object.__new__(timing.ColdTimer)
    timer.steady_ms, timer.flush, timer._flush_count = 0, lambda: done.append("flush"), 1
    monkeypatch.setattr(timing, "_profile", profile)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    subject = timing.Subject(lambda: done.extend(["a", "b"]), "span", 2)
    monkeypatch.setattr(timer, "_warm", lambda subjects: done.clear())
    assert timer.measure({"x": subject}, 4) == {"x": [2.0] * 4}
    assert len(sessions) == 1


def test_the_profilers_own_list_says_what_its_table_says():
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8).add(1)
    table = sorted((event.time_range.start, event.time_range.end) for event in profiler.events())
    assert sorted(tuple(span) for span in timing.gpu_spans(profiler, "CPU")) == table


def test_w4a16_sweeps_survive_an_early_end_and_leave_wrong_arms_out(monkeypatch):
    from chord.bench.results import Row

    def measure(cell, rows, weights, timer, samples, wrong, problems):
        if rows == 8 and cell.scenario == "tp8":
            wrong.add("fast")
        arms = {"fast": 1.0, "slow": 2.0}
        return {a: Row(scenario="s", rows_per_expert=rows, us=us) for a, us in arms.items() if a not in wrong}

    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(w4a16.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(w4a16, "make_weights", lambda shape: None)
    monkeypatch.setattr(w4a16, "EventTimer", lambda steady_ms: None)
    monkeypatch.setattr(w4a16, "_measure", measure)
    program = partial(SimpleNamespace, constants={"loop": "wgmma"}, limit=lambda key: None)
    monkeypatch.setattr(w4a16, "_programs", lambda arch: {arm: program(arm=arm) for arm in ("fast", "slow")})
    monkeypatch.setattr(w4a16, "describe_run", lambda *given: Results(
        suite="w4a16", date="", gpu="g", driver="", torch="", commit="", peers={}, method="", flush="read",
        steady_ms=1, rows=[],
    ))  # fmt: skip
    found = w4a16.tune(expert_rows=(4, 8, 16))
    assert isinstance(found, Tuning)
    assert [interval.arm for interval in found.boxes[0].intervals] == ["slow"]
    assert found.boxes[0].ranges["most_rows"] == (0, w4a16.MAX_EXPERT_ROWS)
    stopped = w4a16.tune(expert_rows=(4, 8), limit_s=0)
    assert (stopped.boxes, stopped.stopped) == ([], "the time limit is over")


def test_the_routers_bench_checks_once_and_compares_bits(monkeypatch):
    """On the CPU, where the reference stands for every program and `spread` writes a wrong weight."""
    import torch

    from chord.checks import router as checks

    judged, subjects_of = [], []

    class Prepared:
        def __init__(self, case, settings, buffers, name):
            options = {**settings._asdict(), **buffers._asdict()}
            self.run = prepare_fused_router(case.logits, case.bias, top_k=case.top_k, **options)
            self.name, self.weights = name, buffers.topk_weights

        def __call__(self):
            if ".wide." in self.name:
                raise RuntimeError("CUDA error: too many resources requested")
            self.run()
            if ".spread." in self.name:
                self.weights[0, 0] += 1e-3

    class Timer:
        def measure(self, subjects, samples):
            subjects_of.append(subjects)
            return {arm: [1.0] * samples for arm in subjects}

    def problems(*given):
        judged.append(given[0].name)
        return router_problems(*given)

    router_problems = checks.router_problems
    monkeypatch.setattr(checks, "router_problems", problems)
    monkeypatch.setattr(router, "prepared_on", Prepared)
    monkeypatch.setattr(router, "graphed", lambda call: call)
    monkeypatch.setattr(router, "candidates", lambda case, settings: list(ARMS.values()))
    on_cpu = router.normal_case
    monkeypatch.setattr(router, "normal_case", lambda n, e, d, device, seed: on_cpu(n, e, d, torch.device("cpu"), seed))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench = router.RouterBench(896, 8, Timer(), 5)
    arms = bench.arms(1)
    assert list(arms) == ["general", "solo", "spread", "wide"]
    times, wrong = bench.time(1, list(arms))
    assert times == {"general": [1.0] * 5, "solo": [1.0] * 5}
    assert wrong["wide"] == "CUDA error: too many resources requested"
    assert "spread.e896.k16.f32.bm8 is wrong: the bits of topk_weights differ" in wrong["spread"]
    assert len(judged) == 1, "the reference is computed once a case"
    assert [subject.activities for subject in subjects_of[0].values()] == [3, 1]
    row = bench.row(1, "general", stats.summarize(times["general"]), "sm_90a")
    assert (row.program, row.samples, row.us) == (ARMS["general"], 5, 1.0)
