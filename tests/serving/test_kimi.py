"""Kimi K2's experts as eight H200s share them, on a GPU: eager and captured, against dequantised weights."""

from __future__ import annotations

import pytest
import torch

from chord.bench import vllm as bench
from chord.bench import vllm_layers as host

pytestmark = pytest.mark.gpu

TOKENS = (1, 8, 64, 512, 4096)
SUBJECTS = {
    ("vllm_tp8", "plugin"): bench.Subject("chord", "chord"),
    ("vllm_ep8", "plugin"): bench.Subject("chord", "chord"),
    ("vllm_ep8", "plugin_contiguous"): bench.Subject("chord", "chord", experts="ChordContiguousExperts"),
    ("vllm_tp8", "stand_in"): bench.Subject("humming", "compressed-tensors", "humming", "indexed"),
    ("vllm_ep8", "stand_in"): bench.Subject("humming", "compressed-tensors", "humming", "grouped"),
    ("vllm_ep8", "stand_in_indexed"): bench.Subject("humming", "compressed-tensors", "humming", "indexed"),
}


@pytest.fixture(scope="module", params=SUBJECTS, ids="-".join)
def two_layers(request: pytest.FixtureRequest):
    split, kind = request.param
    return [bench.make(SUBJECTS[request.param], split, seed) for seed in (0, 10)], kind


def wanted(layer, weights, given):
    return host.reference(weights, given, layer.expert_map)


def check(out: torch.Tensor, right: torch.Tensor) -> None:
    """Close; and nothing at all where no route of any token leads to this rank."""
    if right.any():
        assert host.error(out, right) < bench.MOST_ERROR
    else:
        assert not out.any()


@pytest.mark.parametrize("tokens", TOKENS)
def test_two_layers_in_turn_eager_and_captured(two_layers, tokens: int) -> None:
    made, kind = two_layers
    rows = slice(None) if kind.startswith("plugin") else slice(0, -1)  # the last has no expert: vLLM's to leave
    given = host.routed(tokens, made[0][0].moe_config, 100 + tokens, missing=tokens > 1)
    if tokens == 1:
        rows = slice(None)
    graphs = []
    for layer, weights in made:
        host.run(layer, given)
        host.poison_workspaces()
        check(host.run(layer, given)[rows], wanted(layer, weights, given)[rows])
        graphs.append(bench.capture(layer, given))
    for seed in (1, 2):  # other tokens and routes at the same addresses
        for old, new in zip(given, host.routed(tokens, made[0][0].moe_config, seed, missing=tokens > 1), strict=True):
            old.copy_(new)
        host.poison_workspaces()
        for graph, _ in graphs * 2:
            graph.replay()
        for (layer, weights), (_, out) in zip(made, graphs, strict=True):
            check(out[rows], wanted(layer, weights, given)[rows])


def test_nothing_is_allocated_or_loaded_by_a_forward(two_layers) -> None:
    made, kind = two_layers
    if not kind.startswith("plugin"):
        pytest.skip("vLLM's own humming experts allocate their plans")
    layer, _ = made[0]
    given = host.routed(64, layer.moe_config, 3)
    host.run(layer, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    host.run(layer, given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 1  # the output


def test_batch_invariance(two_layers, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = two_layers
    if not kind.startswith("plugin"):
        pytest.skip("of the plugin")
    layer, _ = made[0]
    monkeypatch.setattr(layer.quant_method.moe_kernel.fused_experts, "_invariant", True)
    given = host.routed(512, layer.moe_config, 3)
    whole = host.run(layer, given)
    for count in (1, 7, 64):
        part = host.Routed(*(tensor[:count].contiguous() for tensor in given))
        assert torch.equal(host.run(layer, part), whole[:count])
