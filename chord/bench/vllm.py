"""Whole experts' apply in vLLM: routed experts of Kimi K2 as eight GPUs share them, beside other backends of vLLM.

Each subject is a layer of vLLM's own classes, loaded and packed as vLLM does it, captured in a CUDA graph. What is
timed is everything between the routing and the sum over a token's experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chord.bench import vllm_layers as layers
from chord.bench.layer import MOST_ERROR, MOST_PEER_ERROR
from chord.bench.peers import from_wheel
from chord.bench.results import Results, Row, describe_run, recorder
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer

TOKENS = (1, 8, 64, 512, 4096)
KIMI: dict[str, Any] = {"experts": 384, "top_k": 8, "hidden": 7168, "intermediate": 2048}
SPLITS: dict[str, dict[str, Any]] = {"vllm_tp8": {"tp": (0, 8)}, "vllm_ep8": {"ep": (3, 8)}}
METHOD = (
    "CUDA events around replays of a graph of the experts' apply, cold L2 (256 MB read before every replay), subjects"
    " in turn on a warm board; vLLM's own classes, loading and routing operators"
)
GEMM_TYPE = "VLLM_HUMMING_MOE_GEMM_TYPE"


class Subject(NamedTuple):
    """A backend: how its layer is made, and what makes vLLM choose it."""

    name: str
    quantization: str
    backend: str = "auto"
    gemm_type: str | None = None
    experts: str | None = None
    """A class of chord's to use instead of the one for the deployment."""


CHORD = {
    "vllm_tp8": [Subject("chord", "chord")],
    "vllm_ep8": [Subject("chord", "chord"), Subject("chord_contiguous", "chord", experts="ChordContiguousExperts")],
}
"""chord's subjects by split: the first is what the plugin does."""
HUMMING = {
    "vllm_tp8": [Subject("humming_indexed", "compressed-tensors", "humming", "indexed")],
    "vllm_ep8": [
        Subject("humming_grouped", "compressed-tensors", "humming", "grouped"),
        Subject("humming_indexed", "compressed-tensors", "humming", "indexed"),
    ],
}
"""Humming's: the first is what vLLM does by itself."""


def run(
    peers: Path | None = None,
    *,
    scenarios: Iterable[str] | None = None,
    tokens: Iterable[int] = TOKENS,
    samples: int = 51,
    steady_ms: int = 200,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measures on the current GPU. peers: a folder with humming's wheel; without one, chord alone.

    scenarios: some of SPLITS, default all. Humming compiles what it has not run before, seconds for each shape and
    count: `warm` in processes of their own, beforehand, saves the time. progress and save are called after each row.
    Raises RuntimeError when a layer's result is wrong: a wrong kernel has no time.
    """
    from chord.integrations import vllm as plugin

    plugin.register()
    versions = {"vllm": metadata.version("vllm")}
    if peers is not None:
        from_wheel(peers, "humming", "humming_kernels")
        versions["humming"] = metadata.version("humming-kernels")
    results = describe_run("layer", METHOD, "read", steady_ms, versions, commit)
    add, timer = recorder(results, progress, save), EventTimer(steady_ms)
    for split in SPLITS if scenarios is None else scenarios:
        subjects = [*CHORD[split], *(HUMMING[split] if peers is not None else [])]
        made, weights = {}, None
        for subject in subjects:  # all are loaded from the same checkpoint
            made[subject.name], weights = make(subject, split)
        assert weights is not None  # noqa: S101 - there is always a subject
        for count in tokens:
            add(measure(made, weights, split, count, timer, samples))
    return results


def warm(split: str, name: str) -> None:
    """Has one of HUMMING[split] compile what it needs for any count. Humming keeps it on disk."""
    (subject,) = (subject for subject in HUMMING[split] if subject.name == name)
    layer, _ = make(subject, split)
    for count in (min(TOKENS), max(TOKENS)):
        layers.run(layer, layers.routed(count, layer.moe_config, count))
    torch.cuda.synchronize()


def make(subject: Subject, split: str, seed: int = 0) -> tuple[Any, layers.Weights]:
    """A loaded layer of the subject, and the checkpoint that it was loaded from."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    from chord.integrations.vllm import experts, method

    if subject.gemm_type is not None:
        os.environ[GEMM_TYPE] = subject.gemm_type
    config = layers.moe_config(**KIMI, **SPLITS[split], backend=subject.backend)
    quantization = get_quantization_config(subject.quantization).from_config(layers.quantization_config())
    layer = layers.routed_experts(config, quantization)
    if subject.experts is not None and isinstance(layer.quant_method, method.ChordMoEMethod):
        layer.quant_method.experts_cls = getattr(experts, subject.experts)
    weights = layers.fill(layer, seed)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, weights


def measure(
    made: dict[str, Any], weights: layers.Weights, split: str, tokens: int, timer: EventTimer, samples: int
) -> Row:
    """One row: every subject's layer, all of the same weights, on the same tokens."""
    calls: dict[str, Callable[[], object]] = {}
    first = made["chord"]
    given = layers.routed(tokens, first.moe_config, tokens)
    right = layers.reference(weights, given, first.expert_map)
    for name, layer in made.items():
        graph, out = capture(layer, given)
        graph.replay()
        wrong = layers.error(out, right) if right.any() else float(out.any())  # no route may be of this rank's
        if not wrong < (MOST_ERROR if name.startswith("chord") else MOST_PEER_ERROR):
            raise RuntimeError(f"{split}, {tokens} tokens: {name} is wrong, relative error {wrong:.2e}")
        calls[name] = graph.replay
    times = timer.measure(calls, samples)
    own = summarize(times.pop("chord"))
    medians = {name: summarize(found).median for name, found in times.items()}
    return Row(
        scenario=split,
        tokens=tokens,
        samples=samples,
        us=own.median,
        p10=own.p10,
        p90=own.p90,
        peers={name: us for name, us in medians.items() if not name.startswith("chord")},
        chord={name: us for name, us in medians.items() if name.startswith("chord")},
    )


def capture(layer: Any, given: layers.Routed) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:  # noqa: ANN401 - vLLM's
    """A graph of one apply, and its output. The inputs are read at their addresses in each replay."""
    for _ in range(2):
        layers.run(layer, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers.run(layer, given)
    return graph, out
