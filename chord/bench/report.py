"""Tables for people from committed results files, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chord.bench.results import Results, Row
from chord.bench.stats import geometric_mean

Cell = tuple[int, int]
"""(tokens, block_m)"""


class Comparison(NamedTuple):
    """One router row beside its peers; ratios above 1 mean that chord is faster."""

    row: Row
    best_peer: str | None
    ratio: float | None
    """Best peer of the same run / chord."""
    recorded_ratio: float | None
    """(SGLang / chord, this run) / (SGLang / recorded peer, its run): the recorded peer's time / chord's."""


def compare(results: Results, scenario: str, recorded: Results | None = None) -> list[Comparison]:
    """Rows of a scenario. recorded: results of a peer that cannot run here, with SGLang measured beside it."""
    others = {} if recorded is None else by_cell(recorded, scenario)
    comparisons = []
    for row in results.rows:
        if row.scenario != scenario:
            continue
        best = min(row.peers, key=lambda name: row.peers[name], default=None)
        ratio = None if best is None else row.peers[best] / row.us
        other = others.get((row.tokens or 0, row.block_m or 0))
        through = None
        if other is not None and "sglang" in row.peers and "sglang" in other.peers:
            through = (row.peers["sglang"] / row.us) / (other.peers["sglang"] / other.us)
        comparisons.append(Comparison(row, best, ratio, through))
    return sorted(comparisons, key=lambda c: (c.row.tokens or 0, c.row.block_m or 0))


def by_cell(results: Results, scenario: str) -> dict[Cell, Row]:
    """Rows of a scenario by tokens and block_m."""
    return {(row.tokens or 0, row.block_m or 0): row for row in results.rows if row.scenario == scenario}


def setting(results: Results) -> str:
    """One line that says where and how the figures were measured."""
    peers = ", ".join(f"{name} {version}" for name, version in sorted(results.peers.items()))
    return (
        f"{results.gpu}, driver {results.driver}, {results.date}, commit {results.commit[:12]}; {results.method}."
        + (f" Peers: {peers}." if peers else "")
    )


def router_table(
    results: Results, scenario: str = "k3", recorded: Results | None = None, label: str = "recorded"
) -> str:
    """A markdown table of a router scenario, one line per token count and block_m, with the geometric means below.

    label: what the column of the recorded peer is called.
    """
    comparisons = compare(results, scenario, recorded)
    if not comparisons:
        raise ValueError(
            f"scenario {scenario!r}: no rows; the file has {sorted({row.scenario for row in results.rows})}"
        )
    peers = sorted({name for c in comparisons for name in c.row.peers})
    through = any(c.recorded_ratio is not None for c in comparisons)
    head = ["tokens", "block_m", "program", "chord us", "p10-p90", *(f"{name} us" for name in peers)]
    head += ["best peer / chord"] if peers else []
    head += [f"{label} / chord"] if through else []
    lines = [table_line(head), table_line(["---:", "---:", "---", *["---:"] * (len(head) - 3)])]
    lines += [table_line(_router_cells(c, peers, through)) for c in comparisons]
    return "\n".join([*lines, "", *_means(comparisons, label)]) + "\n"


def _router_cells(comparison: Comparison, peers: Sequence[str], through: bool) -> list[str]:
    row = comparison.row
    cells = [str(row.tokens), str(row.block_m), f"`{row.program}`", f"{row.us:.2f}", _spread(row, 2)]
    cells += [f"{row.peers[name]:.2f}" if name in row.peers else "" for name in peers]
    cells += [_ratio(comparison.ratio)] if peers else []
    return cells + ([_ratio(comparison.recorded_ratio)] if through else [])


def _spread(row: Row, digits: int) -> str:
    return "" if row.p10 is None or row.p90 is None else f"{row.p10:.{digits}f}-{row.p90:.{digits}f}"


def _means(comparisons: Sequence[Comparison], label: str) -> list[str]:
    lines = []
    for name, ratios in (
        ("best peer of the same run", [c.ratio for c in comparisons if c.ratio is not None]),
        (f"{label}, through SGLang", [c.recorded_ratio for c in comparisons if c.recorded_ratio is not None]),
    ):
        if ratios:
            lines.append(
                f"Against {name}: geometric mean {geometric_mean(ratios):.3f}x over {len(ratios)} cells,"
                f" worst {min(ratios):.3f}x, best {max(ratios):.3f}x."
            )
    return lines


def w4a16_table(results: Results, scenario: str) -> str:
    """A markdown table of a W4A16 scenario, a line per projection and size, with the geometric means below.

    A size is a number of tokens, or of rows an expert. The last column: bytes that must move / time, as a share of how
    fast this GPU read in the same run.
    """
    order = ("gate_up", "down")
    comparisons = sorted(
        compare(results, scenario), key=lambda c: (order.index(c.row.proj or order[0]), size_of(c.row))
    )
    if not comparisons:
        raise ValueError(
            f"scenario {scenario!r}: no rows; the file has {sorted({row.scenario for row in results.rows})}"
        )
    peers = sorted({name for c in comparisons for name in c.row.peers})
    ways = sorted({name for c in comparisons for name in c.row.chord})
    unit = "tokens" if comparisons[0].row.rows_per_expert is None else "rows an expert"
    head = ["projection", unit, "program", "chord us", "p10-p90", *(f"{name} us" for name in peers)]
    head += ["best peer / chord"] if peers else []
    head += [f"chord, {name.replace('_', ' ')} us" for name in ways]
    head += ["of read bandwidth"]
    lines = [table_line(head), table_line(["---", "---:", "---", *["---:"] * (len(head) - 3)])]
    rate = read_rate(results)
    for c in comparisons:
        row = c.row
        cells = [row.proj or "", str(size_of(row)), f"`{row.program}`", f"{row.us:.1f}", _spread(row, 1)]
        cells += [f"{row.peers[name]:.1f}" if name in row.peers else "" for name in peers]
        cells += [_ratio(c.ratio)] if peers else []
        cells += [f"{row.chord[name]:.1f}" if name in row.chord else "" for name in ways]
        cells += ["" if rate is None or row.bytes is None else f"{row.bytes / row.us / rate:.0%}"]
        lines.append(table_line(cells))
    return "\n".join([*lines, "", *_means(comparisons, "recorded")]) + "\n"


def layer_table(results: Results, scenario: str) -> str:
    """A markdown table of whole layers in a framework: a line per count of tokens, the geometric means below."""
    comparisons = sorted(compare(results, scenario), key=lambda c: size_of(c.row))
    peers = sorted({name for c in comparisons for name in c.row.peers})
    ways = sorted({name for c in comparisons for name in c.row.chord})
    head = [
        "tokens",
        "chord us",
        "p10-p90",
        *(f"{name} us" for name in peers),
        *(["best peer / chord"] if peers else []),
    ]
    head += [f"{name.replace('_', ' ')} us" for name in ways]
    lines = [table_line(head), table_line(["---:"] * len(head))]
    for c in comparisons:
        row = c.row
        cells = [str(size_of(row)), f"{row.us:.1f}", _spread(row, 1)]
        cells += [f"{row.peers[name]:.1f}" if name in row.peers else "" for name in peers]
        cells += [_ratio(c.ratio)] if peers else []
        lines.append(table_line([*cells, *(f"{row.chord[name]:.1f}" if name in row.chord else "" for name in ways)]))
    return "\n".join([*lines, "", *_means(comparisons, "recorded")]) + "\n"


def size_of(row: Row) -> int:
    """Rows an expert where those were given, else tokens."""
    return row.rows_per_expert or row.tokens or 0


def read_rate(results: Results) -> float | None:
    """Bytes a microsecond that the GPU read in this run; None where that was not measured."""
    return max((row.bytes / row.us for row in results.rows if row.scenario == "read" and row.bytes), default=None)


def host_table(results: Results) -> str:
    """A markdown table of the host suite: microseconds per way to launch."""
    lines = [table_line(["what", "tokens", "median us", "p10", "p90"]), table_line(["---", *["---:"] * 4])]
    for row in results.rows:
        quantiles = ["" if value is None else f"{value:.2f}" for value in (row.p10, row.p90)]
        lines.append(table_line([row.scenario, str(row.tokens), f"{row.us:.2f}", *quantiles]))
    return "\n".join(lines) + "\n"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def table_line(cells: Sequence[str]) -> str:
    """A line of a markdown table."""
    return f"| {' | '.join(cells)} |"
