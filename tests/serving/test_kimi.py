"""Kimi K2's experts as eight H200s share them, on a GPU: eager and captured, against dequantised weights."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

from chord.bench import vllm as bench
from chord.bench import vllm_layers as host
from chord.registry.loading import default_loader

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


def new_layer(split: str):
    """The plugin's layer, waiting for its checkpoint."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    quantization = get_quantization_config("chord").from_config(host.quantization_config())
    return host.routed_experts(host.moe_config(**bench.KIMI, **bench.SPLITS[split]), quantization)


def capture(layer, given: host.Routed, pool: object) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one forward, with its memory out of a pool that other graphs use as well."""
    host.run(layer, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = host.run(layer, given)
    return graph, out


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


def test_pieces_of_several_sizes_that_share_a_pool(two_layers) -> None:
    """As vLLM's piecewise graphs: one for each layer and size, largest first, in one pool, eager code in between."""
    made, _ = two_layers
    pool, sizes, pieces = torch.cuda.graph_pool_handle(), (512, 64, 8), {}
    for size in sizes:
        given = host.routed(size, made[0][0].moe_config, size)
        host.run(made[0][0], given)
        pieces[size] = given, [capture(layer, given, pool) for layer, _ in made]
    for size in (8, 512, 64, 8):
        given, graphs = pieces[size]
        fresh = host.routed(size, made[0][0].moe_config, 7 * size)
        for old, new in zip(given, fresh, strict=True):
            old.copy_(new)
        for (layer, weights), (graph, out) in zip(made, graphs, strict=True):
            host.poison_workspaces()
            graph.replay()
            check(out, wanted(layer, weights, given))
            given.x.copy_(torch.nn.functional.rms_norm(out.float(), out.shape[-1:]))


@pytest.mark.parametrize("tokens", [8, 512])
def test_beside_shared_experts_on_another_stream(two_layers, tokens: int) -> None:
    """Eager, and as branches of one graph; what runs beside takes as long, and every SM."""
    (layer, _), *_ = two_layers[0]
    given = host.routed(tokens, layer.moe_config, 3)
    alone = host.run(layer, given).clone()
    dense = torch.randn(given.x.shape[1], 8192, device="cuda").to(torch.bfloat16)
    shared, side = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
    expected = (given.x @ dense).float()

    def both() -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(8):
                torch.mm(given.x, dense, out=shared)
        found = host.run(layer, given)
        main.wait_stream(side)
        return found

    for _ in range(3):
        assert torch.equal(both(), alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both()
    for _ in range(3):
        host.poison_workspaces()
        shared.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, alone)
        assert host.error(shared, expected) < bench.MOST_ERROR


def fill_slabs(x: torch.Tensor, counts: torch.Tensor, seed: int) -> None:
    """Random counts, none and all among them, random rows, and NaN behind them."""
    random = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.randint(0, x.shape[1] // 4, counts.shape, generator=random, device="cuda")
    drawn[:3] = torch.tensor([0, x.shape[1], 1])
    counts.copy_(drawn)
    x.copy_(torch.randn(x.shape, generator=random, device="cuda"))
    x[torch.arange(x.shape[1], device="cuda") >= counts.unsqueeze(1)] = float("nan")


def test_slabs_of_a_batched_dispatcher() -> None:
    """Called as the modular kernel calls them, since DeepEP's prepare step needs its library; captured, replayed."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    from chord.integrations.vllm.experts import ChordMaskedExperts

    layer, weights = bench.make(SUBJECTS["vllm_ep8", "plugin"], "vllm_ep8")
    made, slab, local = layer.quant_method, 120, 48
    experts = ChordMaskedExperts(*made._weights, made.moe, made.moe_quant_config, slab, 1)
    hidden = bench.KIMI["hidden"]
    x = torch.empty(local, slab, hidden, dtype=torch.bfloat16, device="cuda")
    counts = torch.empty(local, dtype=torch.int32, device="cuda")
    first, second, shape = experts.workspace_shapes(slab, 0, hidden, 8, 384, local, None, layer.activation)
    lent = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in (first, second)]
    output = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
    given = torch.ones(8, 8, device="cuda")

    def run() -> None:
        for memory in (*lent, output):
            memory.view(torch.int16).fill_(-1)  # NaN
        experts.apply(
            output, x, layer.w13_weight, layer.w2_weight, given, given.int(), layer.activation, 384, None, None, None,
            *lent, meta, False,
        )  # fmt: skip

    fill_slabs(x, counts, 0)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (1, 2, 3):
        fill_slabs(x, counts, seed)
        graph.replay()
        rows = torch.arange(slab, device="cuda") < counts.unsqueeze(1)
        ids = torch.arange(local, device="cuda", dtype=torch.int32).repeat_interleave(counts.long())[:, None]
        wanted = host.reference(weights, host.Routed(x[rows], torch.ones(ids.shape, device="cuda"), ids), None)
        check(output[rows], wanted)
        assert output[~rows].isnan().all()


def test_nothing_is_allocated_or_loaded_by_a_forward(two_layers) -> None:
    made, kind = two_layers
    if not kind.startswith("plugin"):
        pytest.skip("vLLM's own humming experts allocate their plans")
    layer, _ = made[0]
    drawn = [host.routed(tokens, layer.moe_config, 3) for tokens in TOKENS]
    host.run(layer, drawn[-1])  # the workspaces have grown
    torch.cuda.synchronize()
    for given in drawn:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        host.run(layer, given)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 1  # the output


def forget_kernels() -> None:
    """Leaves chord as in a fresh process: nothing opened, nothing loaded."""
    gc.unfreeze()  # what is frozen is not among the objects
    for thing in gc.get_objects():
        if type(thing) is functools._lru_cache_wrapper and thing.__module__.startswith("chord."):
            thing.cache_clear()
    gc.freeze()


@pytest.mark.parametrize("split", bench.SPLITS)
def test_loading_needs_one_experts_copy_besides_and_forwards_load_no_kernel(split: str) -> None:
    forget_kernels()
    loader = default_loader()
    before = torch.cuda.memory_allocated()
    layer = new_layer(split)
    for parameter in layer.parameters():
        parameter.data.fill_(1)
    size = torch.cuda.memory_allocated() - before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * size
    loaded = len(loader._loaded)
    assert loaded > 0
    assert loader is default_loader()
    for tokens in TOKENS:
        host.run(layer, host.routed(tokens, layer.moe_config, 1, missing=tokens > 1))
    torch.cuda.synchronize()
    assert len(loader._loaded) == loaded


@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if subject[1].startswith("plugin")], ids="-".join)
def test_batch_invariance(subject: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen as a user does. A token's bits do not depend on its batch."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, _ = bench.make(SUBJECTS[subject], subject[0])
    given = host.routed(512, layer.moe_config, 3)
    whole = host.run(layer, given)
    assert whole.any()
    for count in (1, 7, 64):
        part = host.Routed(*(tensor[:count].contiguous() for tensor in given))
        assert torch.equal(host.run(layer, part), whole[:count])
