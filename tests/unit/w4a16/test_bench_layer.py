"""The whole-layer bench as far as a CPU goes: cells, draws, chord's chains against float64, and the peers' strings."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from chord.bench import layer, layer_peers, results
from chord.bench.layer_peers import Chain, HummingChains, LayerWeights
from chord.checks.w4a16 import checkpoint
from chord.w4a16 import WeightShape, pack_w4a16

HIDDEN, INNER = 128, 64


def small(experts):
    shapes = WeightShape(experts, 2 * INNER, HIDDEN, gated=True), WeightShape(experts, HIDDEN, INNER)
    (words13, scales13), (words2, scales2) = (checkpoint(shape, torch.device("cpu")) for shape in shapes)
    made = LayerWeights(shapes, (words13, words2), (scales13, scales2))
    return layer.Weights(made, pack_w4a16(words13, scales13, gated=True), pack_w4a16(words2, scales2))


def test_cells_are_those_of_the_goals_and_share_weights_in_a_row():
    every = layer.cells()
    assert len(every) == len(set(every)) == 4 + 5 + 5
    assert [cell.tokens for cell in layer.cells(["tp8"])] == [1024, 2048, 4096, 8192, 16384]
    assert layer.cells(["ep8_decode", "tp8"], [20, 1024]) == [layer.Cell("ep8_decode", 20), layer.Cell("tp8", 1024)]
    assert layer.Cell("ep8_prefill", 1024).local_tokens == 128
    with pytest.raises(ValueError, match=r"scenarios: expected some of .* got \['dense'\]"):
        layer.cells(["dense"])
    with pytest.raises(ValueError, match=r"tokens: expected some of .* got \[7\]"):
        layer.cells(["tp8"], [7])
    with pytest.raises(ValueError, match=r"tokens: expected some of .* got \[7\]"):
        layer.cells(["tp8"], [1024, 7])


def test_every_route_of_an_expert_parallel_cell_is_of_its_rank():
    cell = layer.Cell("ep8_decode", 20)
    work = layer.draw_work(cell, HIDDEN, "cpu")
    torch.manual_seed(cell.tokens)
    drawn = torch.randn(20, 48).topk(8, 1).indices.sort(1).values
    _, ids = layer.reference.route(work.logits, work.bias, 8, True, 1.0)
    assert ids.equal((drawn + layer.LOCAL.start).to(torch.int32)), "the routing of the GEMM bench"
    assert work.expert_map is not None
    assert work.expert_map[ids.long()].min() >= 0
    assert layer.draw_work(layer.Cell("tp8", 20), HIDDEN, "cpu").expert_map is None


@pytest.mark.parametrize(("scenario", "experts"), [("ep8_decode", 48), ("tp8", 384)])
def test_chords_chains_are_the_layer(scenario, experts):
    weights, cell = small(experts), layer.Cell(scenario, 6)
    work = layer.draw_work(cell, HIDDEN, "cpu")
    right = layer.reference_rows(work, weights.checkpoint, 6)
    for make in layer.chord_chains(work, weights, cell.local_experts).values():
        chain = make()
        assert "NaN" in layer.output_problem(chain.out.fill_(float("nan")), right)
        chain.call()
        assert layer.output_problem(chain.out, right) == ""
        assert "relative error of a token" in layer.output_problem(chain.out.roll(1, 0), right)
        assert set(chain.programs) == {"reference"}
        assert results.cubin_of("reference", chain.out.device) == ""


def stubbed(monkeypatch, peers, late=()):
    """measure_cell on a CPU, without graphs and without a clock."""
    monkeypatch.setattr(layer, "graphed", lambda call: call)
    monkeypatch.setattr(layer, "draw_work", lambda cell, hidden, real=layer.draw_work: real(cell, hidden, "cpu"))
    timer = SimpleNamespace(
        measure=lambda calls, samples: {name: [float(len(name))] * samples for name in calls if name not in late}
    )
    weights = small(48)
    given = weights, timer, SimpleNamespace(chains=lambda work, weights: peers(work, weights)), 3
    return layer.measure_cell(layer.Cell("ep8_decode", 6), *given)


def test_a_wrong_peer_has_no_time_and_one_that_refuses_neither(monkeypatch):
    def peers(work, weights):
        right = layer.reference_rows(work, weights, 6).to(torch.bfloat16)
        out = torch.empty_like(right)
        return {
            "good": lambda: Chain(lambda: out.copy_(right), out),
            "wrong": lambda: Chain(lambda: out.fill_(1), out),
            "refuses": lambda: 1 // 0,
        }

    with pytest.warns(UserWarning, match="left out of") as said:
        row = stubbed(monkeypatch, peers)
    assert sorted(str(warning.message).split()[0] for warning in said) == ["refuses", "wrong"]
    assert row.peers == {"good": 4.0}
    assert row.chord == {"swiglu_apart": 12.0}
    assert row.us == 5.0
    assert row.cubins == {"reference": ""}


def test_a_wrong_chain_of_chords_ends_the_run(monkeypatch):
    monkeypatch.setattr(layer, "MOST_ERROR", 0.0)
    with pytest.raises(RuntimeError, match="chord is wrong, so it is not timed: relative error of a token"):
        stubbed(monkeypatch, lambda work, weights: {})


class FakeHumming:
    """humming's two kernels in torch, for rows sorted by expert or found through a plan."""

    def __init__(self, folder):
        self.version = "0"

    def configure(self, config, shape_m, gemm_type):
        return {"block_shape": [config, 0, 0]}

    def activate(self, layer, gate_up, out, **options):
        gate, up = gate_up.float().chunk(2, dim=1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def scatter(self, layer, x, out, scatter_idx, num_valid_tokens):
        out[scatter_idx.flatten().long()] = x.repeat_interleave(8, 0)

    def layer(self, shape, words, scales):
        weights = layer.contract_weights(words, scales).float()

        def forward(rows, outputs, valid_shape_m, compute_config, tuning_config, expert_layout=None, **plan):
            if expert_layout is not None:
                for expert, (first, last) in enumerate(pairwise(expert_layout.tolist())):
                    outputs[first:last] = (rows[first:last].float() @ weights[expert].T).to(torch.bfloat16)
                return
            block = tuning_config["block_shape"][0]
            for number in range(int(plan["num_tokens_padded"]) // block):
                ids = plan["sorted_ids"][number * block :][:block].long()
                ids = ids[ids < outputs.shape[0]]
                weight = weights[plan["expert_ids"][number]]
                outputs[ids] = (rows[ids // plan["top_k"]].float() @ weight.T).to(torch.bfloat16)

        forward.humming_config = 8 if shape.gated else 16  # block sizes: aligned twice
        forward.num_experts, forward.shape_n, forward.shape_k = shape.experts, shape.n, shape.k
        return forward


def fake_operators():
    """vLLM's operators, as far as the chains call them."""

    def topk(logits, groups, kept, top_k, renormalize, factor, bias, scoring):
        weights, ids = layer.reference.route(logits, bias, top_k, renormalize, factor)
        return weights.flip(1).contiguous(), ids.flip(1).contiguous()

    def local(ids, expert_map):
        return ids.flatten() if expert_map is None else expert_map[ids.flatten().long()]

    def align(ids, experts, block, slots, owners, extent, expert_map, scatter):
        flat, place, number = local(ids, expert_map), 0, 0
        slots.fill_(flat.numel())
        for expert in range(experts):
            pairs = (flat == expert).nonzero().flatten()
            slots[place : place + len(pairs)] = pairs.to(torch.int32)
            blocks = -(-len(pairs) // block)
            owners[number : number + blocks] = expert
            place, number = place + blocks * block, number + blocks
        extent.fill_(place)

    def prepare(ids, numbers, expert_map, experts, here, offsets, places, *scratch):
        flat = local(ids, expert_map)
        offsets.copy_(torch.nn.functional.pad(torch.bincount(flat, minlength=here).cumsum(0), (1, 0)))
        places.view(-1)[flat.argsort(stable=True)] = torch.arange(len(flat), dtype=torch.int32)

    def unpermute(rows, weights, places, offsets, top_k, out):
        found = rows.view(-1, out.shape[1])[places.view(-1, top_k).long()].float()
        out.copy_((found * weights[:, :, None]).sum(1))

    return SimpleNamespace(
        grouped_topk=topk, moe_align_block_size=align, moe_prepare_scatter=prepare, moe_unpermute=unpermute,
        moe_permute_sort_workspace_size=lambda rows, experts: 16,
    )  # fmt: skip


def test_a_folder_without_the_peers_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(layer_peers, "Humming", FakeHumming)
    with pytest.raises(
        ValueError, match=f"{tmp_path}: expected a folder with Humming's wheel and vLLM's library: .*moe_C"
    ):
        HummingChains(tmp_path)


@pytest.mark.parametrize(("scenario", "experts"), [("ep8_decode", 48), ("tp8", 384)])
def test_the_peers_chains_are_the_layer_too(scenario, experts, monkeypatch, tmp_path):
    monkeypatch.setattr(layer_peers, "Humming", FakeHumming)
    monkeypatch.setattr(layer_peers, "vllm_operators", lambda folder: "0")
    monkeypatch.setattr(torch.ops, "_moe_C", fake_operators(), raising=False)
    peers, weights = HummingChains(tmp_path), small(experts)
    assert peers.versions == {"humming": "0", "vllm": "0"}
    work = layer.draw_work(layer.Cell(scenario, 6), HIDDEN, "cpu")
    right = layer.reference_rows(work, weights.checkpoint, 6)
    for make in peers.chains(work, weights.checkpoint).values():
        chain = make()
        chain.call()
        assert layer.output_problem(chain.out, right) == ""
    peers.forget()
