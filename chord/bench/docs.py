"""Figures in documents: marked regions are filled from committed results files, so that no figure is typed by hand.

    <!-- figures: router k3 -->
    (replaced)
    <!-- end of figures -->

Regions: `router <scenario>` (table and plot of a router scenario), `w4a16 <scenario>` (table, and a plot for each
projection that was measured at more than one count; a line that says so where no run has the scenario), `host` (the
host suite's table), `layer <scenario>` (table and plot of whole layers, by themselves or in a framework), `summary`
(ratios of every suite against bench/goals.json), `arms` (which token counts run which router arm, from the manifest).
A region of another name, or of a scenario that no suite has, is an error.
"""

from __future__ import annotations

import re
from pathlib import Path

from chord.bench.plot import layer_series, log_log, router_series, w4a16_series
from chord.bench.report import host_table, layer_table, router_table, setting, w4a16_table
from chord.bench.results import Results, read
from chord.bench.summary import lines_of, read_goals, summary_table
from chord.registry import Registry

RECORDED = "flashinfer"
"""Ends the name of the file with figures of a peer that cannot run here; SGLang was measured beside it."""
RECORDED_LABEL = "FlashInfer 0.7.4"
PLOTTED_BLOCK_M = 8
SUMMARY = {
    "layer": ("ep8_decode", "ep8_prefill", "tp8", "vllm_tp8", "vllm_ep8"),
    "w4a16": ("ep8_decode", "ep8_prefill", "tp8", "swiglu_ep8", "grouped_contiguous", "grouped_masked", "sorted_ep8"),
    "router": ("k3", "k2"),
}
"""Scenarios of the summary by suite, in this order."""

_START = "<!-- figures:"
_REGION = re.compile(rf"({_START} ([a-z0-9_ ]+) -->\n)((?:(?!{_START}).)*?)(<!-- end of figures -->)", re.DOTALL)


def latest(folder: Path, suite: str) -> Results:
    """The newest results of a suite by file name, which begins with the date. Raises ValueError when there are none."""
    found = sorted(folder.glob(f"*-{suite}.json"))
    if not found:
        raise ValueError(f"{folder}: expected a results file named <date>-<gpu>-{suite}.json, found none")
    return read(found[-1])


def latest_with(folder: Path, suite: str, scenario: str) -> Results | None:
    """The newest results, whole or of a part of a suite, that have rows of a scenario; None when there are none."""
    for path in sorted([*folder.glob(f"*-{suite}.json"), *folder.glob(f"*-{suite}-*.json")], reverse=True):
        results = read(path)
        if any(row.scenario == scenario for row in results.rows):
            return results
    return None


def update(document: Path, folder: Path) -> bool:
    """Fills a document's regions, and writes its plots beside it, from the results in `folder`. True if it changed.

    Raises ValueError for a document that cannot be read, for figures or a scenario that are unknown, for a region
    without an end, and for results that are not there.
    """
    try:
        before = document.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{document}: expected a document to fill ({error.strerror})") from error
    _check_regions(document, before)
    after = _REGION.sub(lambda match: match[1] + _content(match[2], document, folder) + match[4], before)
    if after != before:
        document.write_text(after, encoding="utf-8")
    return after != before


def _check_regions(document: Path, text: str) -> None:
    """Raises ValueError for a start of a region that is not one: without an end, or with a name of other letters."""
    regions = [match.start() for match in _REGION.finditer(text)]
    for start in re.finditer(re.escape(_START), text):
        if start.start() not in regions:
            line = text[start.start() :].partition("\n")[0]
            raise ValueError(
                f"{document}: expected `{_START} <words in small letters> -->`, then `<!-- end of figures -->` before "
                f"the next region, got {line!r:.80}"
            )


def _check_scenario(kind: str, scenario: str, document: Path) -> None:
    """Raises ValueError for a scenario that no run of the suite can have: it would wait for one for ever."""
    from chord.bench import layer, vllm, w4a16

    known = {"layer": {*layer.TOKENS, *vllm.SPLITS}, "w4a16": w4a16.known_scenarios()}[kind]
    if scenario not in known:
        raise ValueError(
            f"{document}: unknown scenario in figures '{kind} {scenario}', expected one of {', '.join(sorted(known))}"
        )


def _content(region: str, document: Path, folder: Path) -> str:
    kind, _, scenario = region.partition(" ")
    if region == "arms":
        return arms_table(Registry.open())
    if region == "summary":
        return _summary(folder)
    if kind == "host":
        results = latest(folder, "host")
        return f"{setting(results)}\n\n{host_table(results)}"
    if kind == "router" and scenario:
        return _router(scenario, document, folder)
    if kind == "w4a16" and scenario:
        return _w4a16(scenario, document, folder)
    if kind == "layer" and scenario:
        return _layer(scenario, document, folder)
    raise ValueError(
        f"{document}: unknown figures {region!r}, expected `arms`, `host`, `layer <scenario>`, `router <scenario>`, "
        "`summary` or `w4a16 <scenario>`"
    )


def _router(scenario: str, document: Path, folder: Path) -> str:
    results = latest(folder, "router")
    recorded = latest(folder, RECORDED) if list(folder.glob(f"*-{RECORDED}.json")) else None
    table = router_table(results, scenario, recorded, RECORDED_LABEL)
    drawing = document.parent / f"{document.stem}-{scenario.replace('_', '-')}.svg"
    series = router_series(results, scenario, PLOTTED_BLOCK_M, recorded, f"{RECORDED_LABEL} (recorded)")
    title = f"Router {scenario}, block_m {PLOTTED_BLOCK_M}, {results.gpu}, cold L2"
    drawing.write_text(log_log(series, title), encoding="utf-8")
    return f"{setting(results)}\n\n{table}\n![{title}]({drawing.name})\n"


def _layer(scenario: str, document: Path, folder: Path) -> str:
    """Whole layers: table, and a plot of more than one count; a line that says so where no run has the scenario."""
    _check_scenario("layer", scenario, document)
    results = latest_with(folder, "layer", scenario)
    if results is None:
        return "Not measured yet.\n"
    text = f"{setting(results)}\n\n{layer_table(results, scenario)}"
    series = layer_series(results, scenario)
    if len(series["chord"]) < 2:
        return text
    drawing = document.parent / f"{document.stem}-{scenario}.svg".replace("_", "-")
    title = f"Layer {scenario}, {results.gpu}, cold L2"
    drawing.write_text(log_log(series, title), encoding="utf-8")
    return f"{text}\n![{title}]({drawing.name})\n"


def _summary(folder: Path) -> str:
    """One line for each scenario and projection that was measured beside a peer."""
    goals = read_goals(folder.parent / "goals.json")
    recorded = latest(folder, RECORDED) if list(folder.glob(f"*-{RECORDED}.json")) else None
    lines = []
    for suite, scenarios in SUMMARY.items():
        for scenario in scenarios:
            results = latest_with(folder, suite, scenario)
            if results is None:
                continue
            through = recorded if (suite, scenario) == ("router", "k3") else None
            label = "" if through is None else f"{RECORDED_LABEL}, recorded"
            lines += lines_of(results, scenario, goals, through, label)
    return summary_table(lines)


def _w4a16(scenario: str, document: Path, folder: Path) -> str:
    _check_scenario("w4a16", scenario, document)
    results = latest_with(folder, "w4a16", scenario)
    if results is None:
        return "Not measured yet.\n"
    parts = [setting(results), w4a16_table(results, scenario)]
    for proj in ("gate_up", "down"):
        series = w4a16_series(results, scenario, proj)
        if len(series.get("chord", ())) < 2:
            continue
        drawing = document.parent / f"{document.stem}-{scenario}-{proj}.svg".replace("_", "-")
        title = f"W4A16 {scenario} {proj}, {results.gpu}, cold L2"
        unit = "rows an expert" if scenario.startswith("grouped_") else "tokens"
        drawing.write_text(log_log(series, title, unit), encoding="utf-8")
        parts.append(f"![{title}]({drawing.name})\n")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def arms_table(registry: Registry) -> str:
    """Which token counts run which arm for Kimi K3, float32, block_m 8, on sm_90a: one row per route, in order."""
    operator = registry.manifest.operators["fused_router"]
    rows = []
    for route in registry.coverage("fused_router", "sm_90a"):
        where = route.where
        (first, last), (_, block_m) = _interval(where["num_tokens"]), _interval(where["block_m"])
        if (where["num_experts"], where["logits"], block_m) == (896, "f32", PLOTTED_BLOCK_M):
            arm = operator.programs[route.program].arm
            rows.append(
                (
                    first,
                    f"| {first if first == last else f'{first} to {last}'} | `{arm}` | {operator.arms[arm].summary} |",
                )
            )
    header = "| tokens | arm | how |\n|---:|---|---|\n"
    return f"{header}{chr(10).join(line for _, line in sorted(rows))}\n\n{operator.notes.get('sm_90a', '')}\n"


def _interval(side: object) -> tuple[int, int]:
    if isinstance(side, tuple):
        return side
    if isinstance(side, int):
        return side, side
    raise TypeError(f"expected a range or a number, got {side!r}")
