"""Kimi K2's experts as eight H200s share them, on a GPU, through SGLang's layer: against dequantised weights."""

from __future__ import annotations

import pytest
import torch

import sglanghost
from chord.bench import vllm_layers as host
from chord.registry.loading import default_loader

pytestmark = pytest.mark.gpu

TOKENS = (1, 8, 64, 512, 4096)
KIMI = {"experts": 384, "top_k": 8, "hidden": 7168, "intermediate": 2048}
SPLITS = {"tp8": {"tp": (0, 8)}, "ep8": {"ep": (3, 8)}}
MOST_ERROR = 5e-3


@pytest.fixture(scope="module", params=SPLITS)
def two_layers(request: pytest.FixtureRequest):
    """Two packed layers with their checkpoints, the map of experts, and the loader's count of cubins then."""
    split, made = SPLITS[request.param], []
    for seed in (0, 10):
        layer = sglanghost.layer(**KIMI, **split)
        weights = sglanghost.load(layer, seed, **KIMI)
        layer.quant_method.process_weights_after_loading(layer)
        made.append((layer, weights))
    experts = sglanghost.local_experts(KIMI["experts"], split.get("ep", (0, 1)), torch.device("cuda"))
    return made, experts, len(default_loader()._loaded)


def draw(tokens: int, seed: int) -> host.Routed:
    """Random tokens. A tenth of the routes is -1, as are all of the last of several rows."""
    random = torch.Generator("cuda").manual_seed(seed)
    given = sglanghost.routed(tokens, random, **KIMI)
    if tokens > 1:
        given.ids[torch.rand(given.ids.shape, generator=random, device="cuda") < 0.1] = -1
        given.ids[-1] = -1
    return given


def check(out: torch.Tensor, right: torch.Tensor) -> None:
    """Close; and nothing at all where no route of any token leads to this rank."""
    if right.any():
        assert host.error(out, right) < MOST_ERROR
    else:
        assert not out.any()


def poisoned_forward(layer: torch.nn.Module, given: host.Routed) -> torch.Tensor:
    """The forward in memory that holds NaN wherever nobody wrote."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills what it gives
    try:
        return sglanghost.forward(layer, given)
    finally:
        torch.use_deterministic_algorithms(False)


def capture(layer: torch.nn.Module, given: host.Routed) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    for _ in range(2):
        sglanghost.forward(layer, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sglanghost.forward(layer, given)
    return graph, out


@pytest.mark.parametrize("tokens", TOKENS)
def test_two_layers_in_turn_eager_and_captured(two_layers, tokens: int) -> None:
    made, experts, _ = two_layers
    given = draw(tokens, 100 + tokens)
    graphs = []
    for layer, weights in made:
        check(poisoned_forward(layer, given), host.reference(weights, given, experts))
        graphs.append(capture(layer, given))
    for seed in (1, 2):  # other tokens and routes at the same addresses
        for old, new in zip(given, draw(tokens, seed), strict=True):
            old.copy_(new)
        for graph, _ in graphs * 2:
            graph.replay()
        for (_, weights), (_, out) in zip(made, graphs, strict=True):
            check(out, host.reference(weights, given, experts))
            if tokens > 1:
                assert not out[-1].any()


def test_forwards_load_nothing_and_allocate_little(two_layers) -> None:
    made, _, loaded = two_layers
    layer = made[0][0]
    for tokens in TOKENS:
        given = draw(tokens, 4)
        sglanghost.forward(layer, given)
        dispatched = layer.dispatcher.dispatch(given.x, sglanghost.topk_output(given))
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer.quant_method.apply(layer, dispatched)
        made_now = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert made_now <= 2, tokens  # the result, and all else in one piece
    assert len(default_loader()._loaded) == loaded


def test_deterministic_inference(two_layers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's bits do not depend on its batch."""
    layer = two_layers[0][0][0]
    monkeypatch.setattr(layer.quant_method, "_invariant", True)
    given = draw(512, 3)
    whole = sglanghost.forward(layer, given)
    assert whole.any()
    for count in (1, 7, 64):
        part = host.Routed(*(tensor[:count].contiguous() for tensor in given))
        assert torch.equal(sglanghost.forward(layer, part), whole[:count])


def test_packing_needs_one_experts_copy_besides() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = sglanghost.layer(**KIMI, ep=(0, 8))
    for name in ("w13", "w2"):
        getattr(layer, f"{name}_weight_packed").data.fill_(0x12345678)
        getattr(layer, f"{name}_weight_scale").data.fill_(0.5)
    size = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * size
