"""Figures of whole layers: the table, and the region of a document that waits for a run."""

from __future__ import annotations

from pathlib import Path

from chord.bench import docs
from chord.bench.report import layer_table
from chord.bench.results import Results, Row, write

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
    assert not docs.update(page, folder)
