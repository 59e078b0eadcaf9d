"""The down projection that sums each token's rows, every program: values, bits, poison, graphs, streams."""

from __future__ import annotations

import pytest
import torch

import chord
from chord._runtime import architecture, registry
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import make_weights
from chord.bench.w4a16_combine import CombineCell, measure_cell
from chord.checks import w4a16_combine as checks
from chord.checks.w4a16 import draw_experts, plan_of
from chord.w4a16.launch import OPERATOR, serves
from chord.w4a16.layout import WeightShape

pytestmark = pytest.mark.gpu

CASES = {
    "one_block": (WeightShape(1, 64, 64), 5, 8, 8),
    "short_group": (WeightShape(8, 320, 192), 50, 8, 64),
    "ep8_down": (WeightShape(48, 7168, 2048), 50, 8, 8),
    "tp8_down": (WeightShape(384, 7168, 256), 300, 8, 8),
    "tp8_down_long": (WeightShape(384, 7168, 256), 3000, 8, 16),
    "odd_width": (WeightShape(3, 2112, 128), 40, 11, 8),
    "many_experts": (WeightShape(1018, 704, 128), 700, 8, 8),  # and the six elsewhere: all that topk_ids can name
}


def programs(device, shape):
    """Those that serve a shape."""
    arch = architecture(device.index)
    found = registry().manifest.operators[OPERATOR].programs
    return [name for name, program in found.items() if arch in program.architectures and serves(program, shape)]


def call(case, out=None, **more):
    gemm = case.gemm
    return chord.moe_w4a16_combine(
        gemm.x, gemm.packed, gemm.plan, case.topk_weights, case.topk_ids, block_m=gemm.block_m,
        num_experts=case.num_experts, local_experts=case.expert_map, out=out, **more,
    )  # fmt: skip


@pytest.mark.parametrize("routing", ["random", "hot", "mostly_empty", "one", "remote"])
@pytest.mark.parametrize("name", CASES)
def test_every_program_is_right_and_writes_nothing_else(name, routing, device, expect_none):
    case = checks.combine_case(*CASES[name], routing, device)
    expected = checks.expected_of(case)
    found = programs(device, CASES[name][0])
    assert found
    expect_none([problem for program in found for problem in checks.combine_problems(case, expected, program)])


def test_graph_replays_follow_changing_routes(device):
    shape, tokens, top_k = WeightShape(8, 1088, 192), 64, 4
    case = checks.combine_case(shape, tokens, top_k, 8, "random", device)
    plan = chord.allocate_route_plan(tokens, top_k=top_k, num_experts=shape.experts, block_m=8, device=device)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32, device=device)
    case = case._replace(gemm=case.gemm._replace(plan=plan), topk_ids=ids)
    out = torch.empty(tokens, shape.n, dtype=torch.bfloat16, device=device)

    def step():
        local = {"local_experts": case.expert_map, "num_local_experts": shape.experts}
        chord.route_plan(ids, case.num_experts, 8, **local, plan=plan)
        call(case, out)
        call(case, out)  # twice in a graph: what the kernels share is left as the next launch needs it

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, routing in enumerate(("random", "hot", "remote", "one", "random")):
        expert_of = draw_experts(routing, tokens * top_k, shape.experts, seed)
        ids.copy_(torch.where(expert_of >= 0, expert_of + 3, -1).view(tokens, top_k))
        case.topk_weights.uniform_(0.1, 1.0)
        case.gemm.x.normal_()
        out.view(torch.int16).fill_(checks.POISON)
        graph.replay()
        assert torch.equal(out, call(case)), routing
        fresh = case._replace(gemm=case.gemm._replace(expert_of=expert_of))
        expected = checks.expected_of(fresh)
        assert checks.reference.rms_error(out, expected.exact) <= 1.1 * expected.error


def test_two_streams_do_not_disturb_each_other(device):
    cases = [checks.combine_case(WeightShape(8, 1088, 192), 60, 4, 8, "random", device, seed) for seed in range(2)]
    want = [call(case) for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got = [torch.empty_like(out) for out in want]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, case, out in zip(streams, cases, got, strict=True):
            with torch.cuda.stream(stream):
                call(case, out)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_plan_of_other_ids_stays_inside_the_buffers(device):
    case = checks.combine_case(WeightShape(8, 320, 192), 33, 4, 8, "random", device)
    wrong = case._replace(topk_ids=torch.full_like(case.topk_ids, 3))
    memory = torch.full((37, 320), checks.POISON, dtype=torch.int16, device=device)
    call(wrong, memory[2:35].view(torch.bfloat16))
    torch.cuda.synchronize()
    assert (memory[:2] == checks.POISON).all()
    assert (memory[-2:] == checks.POISON).all()
    with pytest.raises(ValueError, match="plan: expected"):
        call(wrong._replace(gemm=wrong.gemm._replace(plan=_plain_plan(case, device))), validate=True)


def _plain_plan(case, device):
    return plan_of(case.gemm.expert_of, case.gemm.packed.shape.experts, 8, device, strange=False)


def test_no_tokens(device):
    case = checks.combine_case(WeightShape(8, 320, 192), 0, 4, 8, "random", device)
    assert call(case).shape == (0, 320)


def test_a_plan_without_blocks_clears_the_output(device):
    case = checks.combine_case(WeightShape(8, 320, 192), 5, 4, 8, "random", device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    plan = chord.w4a16.BlockPlan(nothing, nothing, torch.zeros(1, dtype=torch.int32, device=device))
    out = torch.ones(5, 320, dtype=torch.bfloat16, device=device, requires_grad=True)
    prepared = chord.prepare_moe_w4a16_combine(
        case.gemm.x, case.gemm.packed, plan, case.topk_weights, case.topk_ids, block_m=8,
        num_experts=case.num_experts, local_experts=case.expert_map, out=out,
    )  # fmt: skip
    prepared()
    assert not out.any()


COSTS = [CombineCell("combine_ep8_decode", 20), CombineCell("combine_ep8_prefill", 4096)]
COSTS += [CombineCell("combine_tp8", tokens) for tokens in (20, 1024, 4096, 16384)]


@pytest.mark.parametrize("cell", COSTS, ids=lambda cell: "-".join(map(str, cell)))
def test_the_sums_cost_no_more_than_a_launch_of_their_own(cell):
    """Medians, interleaved, cold L2; once more where they cost more, as others may use the machine."""
    weights, ratios = make_weights(cell.shape), []
    for _ in range(2):
        row = measure_cell(cell, weights, EventTimer(20), 15)
        ratios.append(row.us / row.chord["two_launches"])
        if ratios[-1] <= 1.02:
            return
    raise AssertionError(f"times by those of two launches: {ratios}")
