"""Figures of whole layers: the table, and the region of a document that waits for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from chord.bench import docs
from chord.bench.report import layer_table
from chord.bench.results import Results, Row, write
from chord.bench.summary import lines_of, read_goals

PAGE = "before\n<!-- figures: layer vllm_tp8 -->\nold\n<!-- end of figures -->\nafter\n"


def results() -> Results:
    rows = [
        Row(scenario="vllm_tp8", tokens=64, us=100.0, p10=99.0, p90=101.0, peers={"humming_indexed": 150.0}),
        Row(
            scenario="vllm_tp8",
            tokens=1,
            us=50.0,
            p10=49.0,
            p90=51.0,
            peers={"humming_indexed": 60.0},
            chord={"chord_indexed": 45.0},
        ),
    ]
    return Results(
        suite="layer", date="2026-11-30", gpu="NVIDIA H200", driver="1", torch="2", commit="abc",
        peers={"humming": "0.1.20"}, method="graphs", flush="read", steady_ms=1, rows=rows,
    )  # fmt: skip


def test_a_line_per_count_in_order() -> None:
    lines = layer_table(results(), "vllm_tp8").splitlines()
    assert lines[0] == "| tokens | chord us | p10-p90 | humming_indexed us | best peer / chord | chord indexed us |"
    assert lines[2].startswith("| 1 | 50.0 | 49.0-51.0 | 60.0 | 1.20x | 45.0 |")
    assert lines[3].startswith("| 64 | 100.0 | 99.0-101.0 | 150.0 | 1.50x |")


def test_a_region_waits_for_its_run(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "results"
    page.write_text(PAGE)
    docs.update(page, folder)
    assert "Not measured yet." in page.read_text()
    write(results(), folder / "2026-11-30-h200-layer.json")
    assert docs.update(page, folder)
    assert "| 64 | 100.0 |" in page.read_text()
    assert "(page-vllm-tp8.svg)" in page.read_text()
    assert "humming_indexed" in (tmp_path / "page-vllm-tp8.svg").read_text()
    assert not docs.update(page, folder)


GOALS = """[
 {"suite": "layer", "scenario": "vllm_tp8", "size": 64, "ratio": 1.6},
 {"suite": "layer", "scenario": "vllm_tp8", "size": 1, "ratio": 1.1},
 {"suite": "layer", "scenario": "vllm_tp8", "size": 8, "ratio": 9.0},
 {"suite": "layer", "scenario": "tp8", "size": 64, "ratio": 9.0}
]"""


def test_ratios_are_held_against_the_goals_of_the_same_cells(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "results"
    page.write_text("<!-- figures: summary -->\n<!-- end of figures -->\n")
    (tmp_path / "goals.json").write_text(GOALS)
    write(results(), folder / "2026-11-30-h200-layer.json")
    assert docs.update(page, folder)
    line = page.read_text().splitlines()[3]
    assert line == ("| layer vllm_tp8 | best peer of the run | 2 | 1.34x | 1.20x | 1.50x | 1.34x of 1.33x | 1 of 2 |")
    (tmp_path / "goals.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"goals.json: not a file of goals"):
        docs.update(page, folder)


def test_a_scenario_without_a_peer_has_no_line() -> None:
    alone = results()
    for row in alone.rows:
        row.peers = {}
    assert lines_of(alone, "vllm_tp8", []) == []


def test_the_committed_goals_are_read() -> None:
    goals = read_goals(Path(__file__).parents[3] / "bench" / "goals.json")
    assert len({(goal.suite, goal.scenario, goal.proj, goal.size) for goal in goals}) == len(goals)
    assert min(goal.ratio for goal in goals) >= 1.0
