"""The parts of the W4A16 bench that need no GPU: cells, bytes, tables, plots, regions, plans for peers."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from chord.bench import (
    docs,
    plot,
    report,
    results,
    timing,
    w4a16,
    w4a16_combine,
    w4a16_grouped,
    w4a16_models,
    w4a16_peers,
    w4a16_swiglu,
)
from chord.bench.results import Results, Row
from chord.w4a16.layout import WeightShape


def some_results(rows):
    return Results(
        suite="w4a16", date="2026-12-01", gpu="NVIDIA H200", driver="580.1", torch="2.11", commit="c" * 40,
        peers={"humming": "0.1.20"}, method="how", flush="read", steady_ms=200, rows=rows,
    )  # fmt: skip


def row(proj, tokens, us, scenario="ep8_decode", **more):
    return Row(scenario=scenario, proj=proj, tokens=tokens, block_m=8, program=f"p{tokens}", us=us, **more)


READ = Row(scenario="read", us=250.0, bytes=1_000_000_000)
ROWS = [
    READ,
    row("down", 20, 100.0, bytes=360_000_000, peers={"humming_indexed": 112.0, "marlin": 129.0}),
    row("gate_up", 50, 200.0, bytes=720_000_000, p10=199.0, p90=202.0, peers={"humming_indexed": 240.0}),
    row("gate_up", 20, 190.0, peers={"humming_indexed": 204.0, "marlin": 239.0}),
    row("gate_up", 1024, 215.0, scenario="ep8_prefill", peers={"humming_indexed": 287.0}),
]


def test_cells_are_those_of_the_goals_and_share_weights_in_a_row():
    every = w4a16.cells()
    assert len(every) == len(set(every)) == 2 * (len(w4a16.DECODE_TOKENS) + 2)
    shapes = [cell.shape for cell in every]
    assert sum(a != b for a, b in pairwise(shapes)) == 3, "four sets of weights, each made once"
    longer = w4a16.cells(["ep8_prefill", "tp8"], long=True)
    assert {cell.tokens for cell in longer} == {1024, 2048, 4096, 8192, 16384}
    assert not {cell for cell in longer if cell.scenario == "ep8_decode"}
    with pytest.raises(ValueError, match=r"got \['dense'\]"):
        w4a16._chosen(["dense"])
    kimi = w4a16._chosen(None)
    assert {"ep8_decode", "ep8_prefill", "tp8", "swiglu_ep8", "combine_tp8", *w4a16_grouped.SIZES} <= kimi
    assert w4a16.known_scenarios() == w4a16._chosen([*kimi, w4a16_models.OTHER_MODELS])


def test_other_models_are_asked_for_by_one_name():
    chosen = w4a16._chosen([w4a16_models.OTHER_MODELS, "tp8"])
    assert chosen == {*w4a16_models.SHAPES, "tp8"}
    cells = w4a16.cells(w4a16_models.SHAPES, long=True)
    assert len(cells) == len(set(cells)) == 3 * 2 * (3 + 2)
    shapes = [cell.shape for cell in cells]
    assert sum(a != b for a, b in pairwise(shapes)) == 3 * 2 * 2 - 1, "weights are made once"
    assert w4a16.SHAPES["qwen3_235b_ep8"]["gate_up"] == WeightShape(16, 3072, 4096, gated=True)
    assert w4a16.SHAPES["glm_4_6_tp8"]["down"] == WeightShape(160, 5120, 192)
    assert all(cell.local_tokens == cell.tokens for cell in cells)


def test_grouped_cells_are_those_of_the_goals():
    every = w4a16_grouped.cells(w4a16_grouped.SIZES)
    assert len(every) == len(set(every)) == 2 * (3 + 4 + 5)
    assert sum(a.shape != b.shape for a, b in pairwise(every)) == 1
    assert {cell.size for cell in w4a16_grouped.cells(["grouped_masked", "ep8_decode"])} == {8, 16, 32, 64}


def test_swiglu_cells_share_the_weights_of_gate_up():
    assert w4a16_swiglu.cells(["tp8"]) == []
    assert w4a16_combine.cells(["tp8", "swiglu_ep8"]) == []
    assert [cell.plain for cell in w4a16_combine.cells(["combine_ep8_decode"])] == [
        w4a16.Cell("ep8_decode", "down", 20),
        w4a16.Cell("ep8_decode", "down", 50),
    ]
    assert {cell.shape for cell in w4a16_swiglu.cells([w4a16_swiglu.SWIGLU])} == {
        w4a16.SHAPES["ep8_prefill"]["gate_up"]
    }


def test_grouped_rows_get_a_table_of_their_own():
    rows = [
        Row(scenario="grouped_masked", proj="down", rows_per_expert=size, program="p", us=100.0 + size,
            peers={"humming_masked": 130.0}, chord={"large_slab": 101.0 + size})
        for size in (16, 8)
    ]  # fmt: skip
    lines = report.w4a16_table(some_results(rows), "grouped_masked").splitlines()
    assert "| rows an expert |" in lines[0]
    assert "chord, large slab us" in lines[0]
    assert lines[2] == "| down | 8 | `p` | 108.0 |  | 130.0 | 1.20x | 109.0 |  |"
    assert plot.w4a16_series(some_results(rows), "grouped_masked", "down")["chord"] == [(8, 108.0), (16, 116.0)]


def test_tokens_become_rows_as_the_split_has_it():
    prefill = w4a16.Cell("ep8_prefill", "gate_up", 1024)
    assert prefill.local_tokens * w4a16.TOP_K == 1024
    assert w4a16.Cell("ep8_decode", "down", 50).local_tokens == w4a16.Cell("tp8", "down", 50).local_tokens == 50
    assert (prefill.top_k, w4a16.Cell("tp8", "down", 50).top_k) == (8, 1)


def test_least_bytes_are_those_of_the_goals():
    """793 MB of gate_up weights; 20 tokens reach 46 of 48 experts: 171 us at 4.45 TB/s."""
    shape = w4a16.SHAPES["ep8_decode"]["gate_up"]
    assert w4a16.least_bytes(shape, 48, 0, 0) == 48 * 4096 * 7168 * 9 // 16
    assert w4a16.least_bytes(shape, 46, 20, 160) / 4.45e6 == pytest.approx(171, abs=1)


def test_table_and_share_of_read_bandwidth():
    lines = report.w4a16_table(some_results(ROWS), "ep8_decode").splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2] == "| gate_up | 20 | `p20` | 190.0 |  | 204.0 | 239.0 | 1.07x |  |"
    assert lines[3] == "| gate_up | 50 | `p50` | 200.0 | 199.0-202.0 | 240.0 |  | 1.20x | 90% |"
    assert lines[4] == "| down | 20 | `p20` | 100.0 |  | 112.0 | 129.0 | 1.12x | 90% |"
    assert "best peer of the same run: geometric mean 1.130x over 3 cells" in lines[6]
    assert report.read_rate(some_results(ROWS[1:])) is None
    with pytest.raises(ValueError, match="scenario 'tp8': no rows"):
        report.w4a16_table(some_results(ROWS), "tp8")


def test_documents_get_tables_and_a_plot_where_there_are_two_counts(tmp_path):
    folder = tmp_path / "results"
    results.write(some_results(ROWS), folder / "2026-12-01-h200-w4a16.json")
    assert results.read(folder / "2026-12-01-h200-w4a16.json").rows[0].bytes == READ.bytes
    page = tmp_path / "w4a16.md"
    page.write_text("# x\n\n<!-- figures: w4a16 ep8_decode -->\n<!-- end of figures -->\n")
    assert docs.update(page, folder)
    text = page.read_text()
    assert "(w4a16-ep8-decode-gate-up.svg)" in text
    assert "ep8-decode-down.svg" not in text, "one point is no line"
    assert (tmp_path / "w4a16-ep8-decode-gate-up.svg").read_text().startswith("<svg")
    assert text.endswith("\n<!-- end of figures -->\n")
    assert not docs.update(page, folder)
    assert set(plot.w4a16_series(some_results(ROWS), "ep8_decode", "gate_up")) == {
        "chord", "humming_indexed", "marlin"
    }  # fmt: skip


def test_a_region_takes_the_newest_run_that_has_its_scenario(tmp_path):
    folder, page = tmp_path / "results", tmp_path / "w4a16.md"
    page.write_text("<!-- figures: w4a16 grouped_masked -->\n<!-- end of figures -->\n")
    results.write(some_results(ROWS), folder / results.file_name(some_results(ROWS)))
    assert docs.update(page, folder)
    assert "Not measured yet." in page.read_text()
    rows = [Row(scenario="grouped_masked", proj="down", rows_per_expert=8, program="p", us=99.0)]
    part = folder / results.file_name(some_results(rows), "grouped")
    assert part.name == "2026-12-01-h200-w4a16-grouped.json"
    results.write(some_results(rows), part)
    assert docs.update(page, folder)
    assert "| down | 8 | `p` | 99.0 |" in page.read_text()
    found = docs.latest_with(folder, "w4a16", "ep8_decode")
    assert found is not None
    assert len(found.rows) == len(ROWS)


def test_peers_get_the_block_size_and_the_plan_that_they_would_have():
    assert [w4a16_peers.marlin_block_m(8 * tokens, 48) for tokens in (20, 50, 128, 16384)] == [8, 16, 32, 64]
    shape = WeightShape(4, 64, 64)
    ids = torch.tensor([[0, 3], [3, 0], [3, 0]], dtype=torch.int32)
    work = w4a16_peers.Work(shape, torch.empty(3, 64), ids, 2)
    slots, experts, extent = w4a16_peers.exact_plan(work, 8)
    assert experts.tolist() == [0, 3]
    assert slots.numel() == int(extent) == 16
    assert slots[:3].tolist() == [0, 3, 5]


def test_results_are_sampled_against_float64():
    shape = WeightShape(4, 128, 64)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (4, 128, 8), dtype=torch.int32)
    scales = (torch.rand(4, 128, 2) * 0.04 + 0.005).to(torch.bfloat16)
    weights = w4a16.Weights(words, scales, w4a16.pack_w4a16(words, scales))
    ids = torch.randint(0, 4, (6, 2), dtype=torch.int32)
    work = w4a16_peers.Work(shape, torch.randn(6, 64).to(torch.bfloat16), ids, 2)
    prepared = w4a16.checked_launch(work, weights)
    assert prepared.program == "reference"
    prepared.out[0, 0] = float("nan")
    assert "hold NaN" in w4a16.sampled_problem(work, weights, prepared.out)
    assert "RMS error" in w4a16.sampled_problem(work, weights, prepared.out.nan_to_num() * 1.5)


def test_a_peer_that_fails_is_left_out_and_said_so(monkeypatch):
    class Peer:
        version = "1"

        def calls(self, work):
            return {"works": lambda: None, "fails": lambda: 1 // 0}

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    work = w4a16_peers.Work(WeightShape(1, 64, 64), torch.empty(1, 64), torch.zeros(1, 1, dtype=torch.int32), 1)
    with pytest.warns(UserWarning, match="fails left out at 1 rows of .*division"):
        assert set(w4a16.working(Peer(), work, Peer().calls)) == {"works"}


def test_peers_that_the_folder_lacks_are_left_out(tmp_path, monkeypatch):
    class Peer:
        version = "1"

    monkeypatch.setitem(w4a16.PEERS, "humming", lambda folder: Peer())
    with pytest.warns(UserWarning, match="marlin left out: .*No such file"):
        assert list(w4a16.usable_peers(tmp_path)) == ["humming"]
    monkeypatch.delitem(w4a16.PEERS, "humming")
    with pytest.warns(UserWarning, match="marlin left out"), pytest.raises(ValueError, match="expected a folder with"):
        w4a16.usable_peers(tmp_path)


class FakeClock:
    """Counts flushes and calls; the GPU has reached an event unless at least `needed` flushes lie right before it."""

    def __init__(self, needed):
        self.needed, self.flushes, self.calls, self.lead = needed, 0, 0, 0

    def flush(self):
        self.flushes += 1
        self.lead += 1

    def call(self):
        self.calls += 1

    def slow_call(self):
        self.calls += 1
        self.lead -= 8

    def event(self):
        clock = self

        class Event:
            def record(self):
                self.at = clock.calls

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e-3

            def query(self):
                late, clock.lead = clock.lead < clock.needed, 0
                return late

        return Event()


@pytest.fixture
def clock(monkeypatch):
    def use(needed):
        made = FakeClock(needed)
        monkeypatch.setattr(timing, "ReadFlush", lambda: made.flush)
        monkeypatch.setattr(timing, "_event", made.event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return made, timing.EventTimer(steady_ms=0)

    return use


def test_events_enclose_one_call_each_and_flushes_grow_until_the_host_is_ahead(clock):
    made, timer = clock(needed=2)
    times = timer.measure({"a": made.call, "b": made.call}, samples=3)
    assert times == {"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}
    assert made.flushes == 3 * 2 * (1 + 2)


def test_a_call_whose_launches_fall_behind_is_left_out(clock):
    made, timer = clock(needed=1)
    with pytest.warns(UserWarning, match="launched slow more slowly than the GPU ran, with up to 8 cache flushes"):
        assert timer.measure({"a": made.call, "slow": made.slow_call}, samples=3) == {"a": [1.0, 1.0, 1.0]}
    with pytest.raises(timing.TimelineError, match="launched slow more slowly"):
        timer.measure({"slow": made.slow_call, "a": made.call}, samples=3)


def test_a_run_that_ends_early_leaves_what_it_measured(tmp_path, monkeypatch):
    from chord.cli import bench

    def stopped_at_the_second_cell(cell, *rest):
        if cell.tokens == w4a16.DECODE_TOKENS[1]:
            raise KeyboardInterrupt
        return row(cell.proj, cell.tokens, 40.0)

    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(w4a16, "describe_run", lambda *given: some_results([]))
    monkeypatch.setattr(w4a16, "EventTimer", lambda steady_ms: None)
    monkeypatch.setattr(w4a16, "measure_read", lambda *given: READ)
    monkeypatch.setattr(w4a16, "make_weights", lambda shape: w4a16.Weights(None, None, SimpleNamespace(shape=shape)))
    monkeypatch.setattr(w4a16, "measure_cell", stopped_at_the_second_cell)
    with pytest.raises(KeyboardInterrupt):
        bench.bench_w4a16(tmp_path, scenario=["ep8_decode"], part="cut")
    (path,) = tmp_path.iterdir()
    assert path.name == "2026-12-01-h200-w4a16-cut.json"
    assert [found.us for found in results.read(path).rows] == [READ.us, 40.0]
