"""The parts of the bench that need no GPU: statistics, timelines, results files, tables, plots."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chord.bench import docs, plot, preloaded, report, results, router, stats, timing
from chord.bench.peers import from_wheel
from chord.bench.results import Results, Row


def some_results(rows, **changes):
    fields = {
        "suite": "router",
        "date": "2026-12-01",
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11",
        "commit": "c" * 40,
        "peers": {"sglang": "0.5.23"},
        "method": "how",
        "flush": "read",
        "steady_ms": 200,
        "rows": rows,
    }
    return Results(**{**fields, **changes})


def k3(tokens, us, sglang=None, block_m=8, **more):
    peers = {} if sglang is None else {"sglang": sglang}
    return Row(scenario="k3", tokens=tokens, block_m=block_m, program=f"p{tokens}", us=us, peers=peers, **more)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_quantiles_are_ordered_and_inside(samples):
    summary = stats.summarize(samples)
    assert min(samples) <= summary.p10 <= summary.median <= summary.p90 <= max(samples)
    assert summary.samples == len(samples)


def test_known_quantiles():
    assert stats.summarize([3.0, 1.0, 2.0]) == (2.0, 1.2, 2.8, 3)
    assert stats.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    for function in (stats.summarize, stats.geometric_mean):
        with pytest.raises(ValueError, match="expected at least one"):
            function([])


def test_timelines_are_cut_by_number_in_order_of_start():
    spans = [timing.Span(start, start + 1.0) for start in (5.0, 0.0, 2.0, 3.0, 7.0, 9.0)]
    rounds = timing.split_timeline(spans, [1, 2], 2)
    assert [[[span.start for span in group] for group in groups] for groups in rounds] == [
        [[0.0], [2.0, 3.0]],
        [[5.0], [7.0, 9.0]],
    ]
    with pytest.raises(timing.TimelineError, match=r"expected 3 rounds of \[1, 2\] GPU activities, got 6"):
        timing.split_timeline(spans, [1, 2], 3)


def test_durations_with_and_without_gaps():
    overlapping = [timing.Span(0.0, 3.0), timing.Span(2.0, 4.0)]
    apart = [timing.Span(0.0, 1.0), timing.Span(10.0, 12.0)]
    assert timing.duration(overlapping, "span") == 4.0
    assert timing.duration(overlapping, "sum") == 5.0
    assert timing.duration(apart, "span") == 12.0
    assert timing.duration(apart, "sum") == 3.0


def test_results_files_are_stable_and_read_back(tmp_path):
    measured = some_results([k3(1, 2.17512345, 6.2, p10=2.1, p90=2.2), k3(2, 2.5)])
    path = tmp_path / "deep" / results.file_name(measured)
    assert path.name == "2026-12-01-h200-router.json"
    results.write(measured, path)
    first = path.read_bytes()
    again = results.read(path)
    assert again.rows[0].us == 2.175
    assert again == measured
    results.write(again, path)
    assert path.read_bytes() == first
    plain = json.loads(first)
    assert plain["schema"] == 1
    assert plain["rows"][1] == {"scenario": "k3", "tokens": 2, "block_m": 8, "program": "p2", "us": 2.5}
    assert b'{"scenario":"k3","tokens":2' in first.splitlines()[-3], "one row a line"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "expected results schema 1, got 2"),
        ({"colour": "red"}, "not a results file"),
        ({"rows": 3}, "not a"),
    ],
)
def test_unreadable_results_name_the_file(tmp_path, change, message):
    path = tmp_path / "r.json"
    results.write(some_results([k3(1, 2.0)]), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"r\.json: {message}"):
        results.read(path)


def test_ratios_to_the_best_peer_and_through_sglang():
    ours = some_results([k3(1, 2.0, 6.0), k3(2, 5.0, 6.0), k3(4, 2.0)])
    recorded = some_results([k3(1, 3.0, 7.5), k3(2, 2.0, 6.0)])
    one, two, four = report.compare(ours, "k3", recorded)
    assert (one.best_peer, one.ratio) == ("sglang", 3.0)
    assert one.recorded_ratio == pytest.approx((6.0 / 2.0) / (7.5 / 3.0))
    assert (four.best_peer, four.ratio, four.recorded_ratio) == (None, None, None)
    assert two.recorded_ratio == pytest.approx(0.4)


def test_router_table():
    ours = some_results([k3(2, 5.0, 6.0), k3(1, 2.0, 6.0, p10=1.9, p90=2.1)])
    recorded = some_results([k3(1, 3.0, 7.5)])
    lines = report.router_table(ours, "k3", recorded, "FlashInfer 0.7.4").splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2] == "| 1 | 8 | `p1` | 2.00 | 1.90-2.10 | 6.00 | 3.00x | 1.20x |"
    assert lines[3] == "| 2 | 8 | `p2` | 5.00 |  | 6.00 | 1.20x |  |"
    assert "geometric mean 1.897x over 2 cells, worst 1.200x" in lines[5]
    assert lines[6].startswith("Against FlashInfer 0.7.4, through SGLang: geometric mean 1.200x")
    with pytest.raises(ValueError, match=r"scenario 'k9': no rows; the file has \['k3'\]"):
        report.router_table(ours, "k9")


def test_host_table_and_setting():
    host = some_results([Row(scenario="prepared", tokens=1, us=5.75, p10=5.5, p90=6.25)], suite="host", peers={})
    assert "| prepared | 1 | 5.75 | 5.50 | 6.25 |" in report.host_table(host)
    assert report.setting(host).startswith("NVIDIA H200, driver 580.1, 2026-12-01, commit cccccccccccc; how.")


def test_plot_is_wellformed_and_holds_every_series():
    ours = some_results([k3(2**i, 2.0 + i, 6.0 + i) for i in range(14)])
    recorded = some_results([k3(1, 3.0, 7.5)])
    series = plot.router_series(ours, "k3", 8, recorded, "FlashInfer <0.7.4>")
    assert {name: len(points) for name, points in series.items()} == {
        "chord": 14,
        "sglang": 14,
        "FlashInfer <0.7.4>": 1,
    }
    drawing = plot.log_log(series, "Router & plan")
    root = ElementTree.fromstring(drawing)
    text = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"chord", "sglang", "FlashInfer <0.7.4>", "Router & plan", "8192", "tokens"} <= set(text)
    assert plot.log_log(series, "Router & plan") == drawing
    with pytest.raises(ValueError, match="expected at least one point"):
        plot.log_log({}, "nothing")


def test_a_single_point_can_be_drawn():
    assert "nan" not in plot.log_log({"chord": [(1, 2.0)]}, "one")


def test_cells_of_the_suite():
    every = router.cells()
    k3_cells = {(cell.tokens, cell.block_m) for cell in every if cell.scenario == "k3"}
    assert {(tokens, block_m) for tokens in (1, 3, 100, 6000, 8192) for block_m in (8, 16)} <= k3_cells
    assert len(k3_cells) == 40
    assert {cell.num_experts for cell in router.cells(["k2"])} == {384}
    assert math.isclose(sum(cell.local_experts is not None for cell in every), 14)
    with pytest.raises(ValueError, match=r"got \['k9'\]"):
        router.cells(["k9"])


def test_documents_are_filled_from_results_files(tmp_path):
    folder = tmp_path / "results"
    newest = some_results([k3(1, 2.0, 6.0), k3(2, 5.0, 6.0)])
    results.write(some_results([k3(1, 9.0, 9.0)], date="2026-11-01"), folder / "2026-11-01-h200-router.json")
    results.write(newest, folder / "2026-12-01-h200-router.json")
    results.write(some_results([k3(1, 3.0, 7.5)]), folder / "2026-11-30-h200-flashinfer.json")
    document = tmp_path / "router.md"
    document.write_text("# Router\n\n<!-- figures: router k3 -->\nstale\n<!-- end of figures -->\n\nafter\n")
    assert docs.update(document, folder)
    text = document.read_text()
    assert "| 1 | 8 | `p1` | 2.00 |" in text
    assert "FlashInfer 0.7.4, through SGLang" in text
    assert "stale" not in text
    assert text.endswith("<!-- end of figures -->\n\nafter\n")
    assert "(router-k3.svg)" in text
    assert (tmp_path / "router-k3.svg").read_text().startswith("<svg")
    assert not docs.update(document, folder), "a second run changes nothing"


def test_documents_with_unknown_figures_are_refused(tmp_path):
    document = tmp_path / "d.md"
    document.write_text("<!-- figures: weather -->\n<!-- end of figures -->\n")
    with pytest.raises(ValueError, match="unknown figures 'weather'"):
        docs.update(document, tmp_path)
    for wrong in ("layer vllm_tp9", "w4a16 read", "w4a16 ep8"):
        document.write_text(f"<!-- figures: {wrong} -->\n<!-- end of figures -->\n")
        with pytest.raises(ValueError, match=rf"d\.md: unknown scenario in figures '{wrong}', expected one of .*tp8"):
            docs.update(document, tmp_path)
    end = "<!-- end of figures -->\n"
    for text in ("<!-- figures: layer TP8 -->\n" + end, "<!-- figures: layer tp8 -->\n<!-- figures: host -->\n" + end):
        document.write_text(text)
        with pytest.raises(
            ValueError, match=r"expected `<!-- figures: .* before the next region, got '<!-- figures: la"
        ):
            docs.update(document, tmp_path)
    document.write_text("<!-- figures: host -->\n<!-- end of figures -->\n")
    with pytest.raises(ValueError, match=r"-host\.json, found none"):
        docs.update(document, tmp_path)
    document.write_text("<!-- figures: summary -->\n<!-- end of figures -->\n")
    with pytest.raises(ValueError, match=r"goals\.json: expected a file of goals beside the results' folder \(No such"):
        docs.update(document, tmp_path / "results")
    with pytest.raises(ValueError, match=r"none\.md: expected a document to fill \(No such file"):
        docs.update(tmp_path / "none.md", tmp_path)


def test_first_launches_of_other_operators_are_refused():
    with pytest.raises(ValueError, match="operator: expected one of fused_router, moe_w4a16, got 'route_plan'"):
        preloaded.measure("route_plan")


def test_programs_of_a_peers_wheel_stay_executable(tmp_path):
    (tmp_path / "whl").mkdir()
    with zipfile.ZipFile(tmp_path / "whl" / "peer_of_ours-1.0-py3-none-any.whl", "w") as wheel:
        for name, mode, text in (("__init__.py", 0o644, ""), ("tool", 0o755, "#!/bin/sh\necho compiled\n")):
            entry = zipfile.ZipInfo(f"peer_of_ours/{name}")
            entry.external_attr = (stat.S_IFREG | mode) << 16
            wheel.writestr(entry, text)
    folder = Path(from_wheel(tmp_path, "peer_of_ours", "peer_of_ours").__file__).parent
    assert subprocess.check_output([folder / "tool"], text=True) == "compiled\n"
    assert not os.access(folder / "__init__.py", os.X_OK)
