"""Prepared W4A16 launches and the experts' layer on a GPU: bits, graphs, memory, and the CPU's own result."""

from __future__ import annotations

import pytest
import torch

import chord
from chord import _runtime
from chord.bench import w4a16 as bench
from chord.bench.host import launch_times
from chord.checks import w4a16 as checks
from chord.w4a16.layout import WeightShape
from chord.w4a16.reference import rms_error

pytestmark = pytest.mark.gpu

GATE_UP, DOWN = WeightShape(8, 512, 256, gated=True), WeightShape(8, 256, 256)


@pytest.fixture
def layer(device):
    packed = [chord.pack_w4a16(*checks.checkpoint(shape, device), gated=shape.gated) for shape in (GATE_UP, DOWN)]
    return chord.W4A16Experts(*packed)


def inputs(device, tokens=33, top_k=4, seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, GATE_UP.k, generator=generator, device=device).to(torch.bfloat16)
    chosen = torch.rand(tokens, GATE_UP.experts, generator=generator, device=device).topk(top_k)
    return x, torch.softmax(chosen.values, 1), chosen.indices.to(torch.int32)


def test_a_prepared_launch_gives_the_operators_bits_on_every_stream_and_in_graphs(device):
    case = checks.gemm_case(GATE_UP, 40, 4, 8, "random", device, weighted=True)
    options = {"top_k": 4, "block_m": 8, "row_weight": case.row_weight, "zero_missing": True}
    want = chord.moe_w4a16(case.x, case.packed, case.plan, **options)
    prepared = chord.prepare_moe_w4a16(case.x, case.packed, case.plan, **options)
    assert prepared.program.startswith("moe_w4a16.")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            prepared.out.fill_(float("nan"))
            prepared()
        stream.synchronize()
        assert torch.equal(prepared.out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared()
    prepared.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(prepared.out, want)


def test_a_prepared_launch_allocates_nothing(device):
    case = checks.gemm_case(GATE_UP, 40, 4, 8, "random", device)
    prepared = chord.prepare_moe_w4a16(case.x, case.packed, case.plan, top_k=4, block_m=8)
    prepared()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(20):
        prepared()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


def test_a_prepared_launch_costs_at_most_a_microsecond_above_a_bare_driver_call(device):
    case = checks.gemm_case(WeightShape(8, 256, 256), 4, 2, 8, "random", device)
    times = launch_times(chord.prepare_moe_w4a16(case.x, case.packed, case.plan, top_k=2, block_m=8))
    assert times.prepared_us - times.bare_us <= 1.0, times[:2]


def test_opcheck(device):
    case = checks.gemm_case(GATE_UP, 9, 2, 8, "random", device, weighted=True)
    scalars = (True, 2, 8, 3, False, True, False)
    arguments = (case.x, case.packed.data, *case.plan, case.row_weight, *scalars)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.chord.moe_w4a16.default, arguments, test_utils=tests)
    out = torch.zeros(18, GATE_UP.n, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.chord.moe_w4a16_out.default, (*arguments, out), test_utils=tests)


def test_the_layer_compiles_to_one_graph(layer, device):
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 33):
        given = inputs(device, tokens=tokens)
        assert torch.equal(compiled(*given), layer(*given))


def test_the_first_call_may_be_inside_a_capture_once_programs_are_loaded(layer, device):
    for operator in ("moe_w4a16", "moe_w4a16_combine"):
        _runtime.registry().preload(operator)
    x, weights, ids = inputs(device, tokens=7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, weights, ids)
    graph.replay()
    assert torch.equal(captured, layer(x, weights, ids))


def test_the_layer_agrees_with_the_cpu(layer, device):
    x, weights, ids = inputs(device)
    ids[::3, 0] = -1
    got = layer(x, weights, ids)
    want = layer.to("cpu")(x.cpu(), weights.cpu(), ids.cpu())
    assert rms_error(got.cpu(), want.to(torch.float64)) < 5e-3


def test_the_layer_replays_in_a_graph(layer, device):
    x, weights, ids = inputs(device)
    layer(x, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, weights, ids)
    for buffer, fresh in zip((x, weights, ids), inputs(device, seed=5), strict=True):
        buffer.copy_(fresh)
    graph.replay()
    assert torch.equal(captured, layer(x, weights, ids))


def test_loading_needs_little_more_memory_than_the_packed_experts(device, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    shapes = {"w13": WeightShape(32, 1024, 1024, gated=True), "w2": WeightShape(32, 1024, 512)}
    tensors = {}
    for name, shape in shapes.items():
        words, scales = checks.checkpoint(shape, torch.device("cpu"))
        tensors |= {f"experts.{name}_weight_packed": words, f"experts.{name}_weight_scale": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = chord.W4A16Experts.from_safetensors(tmp_path, "experts", device=device)
    packed = loaded.w13.nbytes + loaded.w2.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * packed
    words, scales = chord.unpack_w4a16(chord.PackedW4A16(loaded.w2, loaded.w2_shape))
    assert torch.equal(words.cpu(), tensors["experts.w2_weight_packed"])
    assert torch.equal(scales.cpu(), tensors["experts.w2_weight_scale"])


def test_the_bench_measures_what_it_has_checked(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "ep8_prefill", {"gate_up": GATE_UP, "down": DOWN})
    found = bench.run(scenarios=["ep8_prefill"], samples=5, steady_ms=5, commit="c")
    assert [(row.scenario, row.proj) for row in found.rows] == [
        ("read", None), ("ep8_prefill", "gate_up"), ("ep8_prefill", "down")
    ]  # fmt: skip
    assert all(row.us > 0 and row.bytes for row in found.rows)
    assert found.rows[0].bytes / found.rows[0].us > 1e6, "more than 1 TB/s"
