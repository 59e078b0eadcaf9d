"""The grouped W4A16 programs: values, poison and bits over spreads of rows, graphs, wrong device data, large slabs."""

from __future__ import annotations

import pytest
import torch

import chord
from chord._runtime import architecture, registry
from chord.bench.host import launch_times
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.checks import w4a16 as checks
from chord.checks import w4a16_grouped as grouped
from chord.w4a16 import reference
from chord.w4a16.grouped_rows import ContiguousRows, MaskedRows
from chord.w4a16.launch import serves
from chord.w4a16.layout import WeightShape
from chord.w4a16.rows import combine_rows

pytestmark = pytest.mark.gpu

SHAPES = {
    "one_block": (WeightShape(1, 64, 64), 5),
    "short_group": (WeightShape(8, 320, 192), 21),
    "gated_short_group": (WeightShape(8, 448, 320, gated=True), 70),
    "ep8_gate_up": (WeightShape(48, 4096, 7168, gated=True), 8),
    "ep16_down": (WeightShape(24, 7168, 2048), 40),
    "ep32_gate_up": (WeightShape(12, 4096, 7168, gated=True), 150),
    "ep32_down": (WeightShape(12, 7168, 2048), 11),
    "tp8_gate_up": (WeightShape(384, 512, 7168, gated=True), 4),
    "tp8_down": (WeightShape(384, 7168, 256), 9),
    "qwen3_235b_down": (WeightShape(16, 4096, 1536), 30),
    "deepseek_v3_gate_up": (WeightShape(32, 4096, 7168, gated=True), 12),
    "glm_4_6_gate_up": (WeightShape(20, 3072, 5120, gated=True), 60),
    "many_experts": (WeightShape(1024, 64, 128), 3),
}
SMALL = ("one_block", "short_group", "gated_short_group", "many_experts")


def programs(form, device, shape=None):
    operator = registry().manifest.operators[grouped.FORMS[form]]
    arch = architecture(device.index)
    return {
        name: program
        for name, program in operator.programs.items()
        if arch in program.architectures and (shape is None or serves(program, shape))
    }


def run(case, program):
    memory, out = checks.poisoned_output(case)
    grouped.run_program(case, program, out)
    return memory, out


@pytest.mark.parametrize("form", grouped.FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_program_is_right_and_writes_nothing_else(shape, form, device, expect_none):
    problems = []
    sizes, mean = SHAPES[shape]
    for place, spread in enumerate(grouped.SPREADS if shape in SMALL else ("ragged", "hot")):
        counts = grouped.draw_counts(spread, mean, sizes.experts)
        options = {"weighted": place % 2 == 1, "spare_rows": 0 if spread == "full" else 5}
        for swiglu in {False, sizes.gated}:
            case = grouped.grouped_case(sizes, form, counts, device, swiglu=swiglu, **options)
            expected = grouped.expected_of(case)
            for program in programs(form, device, sizes):
                problems += grouped.grouped_problems(case, expected, program)
    expect_none(problems)


@pytest.mark.parametrize("swiglu", [False, True])
def test_every_form_and_the_indexed_operator_give_equal_bits(swiglu, device):
    shape = SHAPES["gated_short_group"][0]
    counts = grouped.draw_counts("ragged", 30, shape.experts)
    results = {}
    for form in grouped.FORMS:
        case = grouped.grouped_case(shape, form, counts, device, swiglu=swiglu)
        mine = (case.expert_of >= 0).to(device)
        rows = torch.randn(sum(counts), shape.k, generator=torch.Generator(device=device).manual_seed(3), device=device)
        case.x.view(-1, shape.k)[mine] = rows.to(torch.bfloat16)
        for name, program in programs(form, device).items():
            loop = program.constants["loop"]
            got = run(case, name)[1][mine].view(torch.int16)
            assert torch.equal(results.setdefault(loop, got), got), (form, name)
    ids = torch.repeat_interleave(torch.arange(shape.experts), torch.tensor(counts)).to(device, torch.int32)[:, None]
    plan, x = chord.route_plan(ids, shape.experts, 8), rows.to(torch.bfloat16)
    indexed = chord.moe_w4a16(x, case.packed, plan, top_k=1, block_m=8, swiglu=swiglu)
    assert torch.equal(results["wgmma"], indexed.view(torch.int16))


@pytest.mark.parametrize("form", grouped.FORMS)
def test_a_row_ignores_its_company(form, device):
    shape = SHAPES["gated_short_group"][0]
    counts = grouped.draw_counts("ragged", 30, shape.experts)
    case = grouped.grouped_case(shape, form, counts, device)
    alone = [1 if expert == 3 else 0 for expert in range(shape.experts)]
    single = grouped.grouped_case(shape, form, alone, device)
    first = int((case.expert_of == 3).nonzero()[0, 0])
    where = int((single.expert_of == 3).nonzero()[0, 0])
    single.x.view(-1, shape.k)[where] = case.x.view(-1, shape.k)[first]
    for name in programs(form, device):
        many, one = run(case, name)[1], run(single, name)[1]
        assert torch.equal(many.view(torch.int16)[first], one.view(torch.int16)[where]), name


def test_swiglu_is_at_least_as_exact_as_three_steps(device):
    shape = SHAPES["ep8_gate_up"][0]
    case = grouped.grouped_case(shape, "offsets", grouped.draw_counts("ragged", 6, 48), device, swiglu=True)
    exact, named = grouped.expected_of(case).exact, (case.expert_of >= 0).to(device)
    offsets = case.rows.offsets
    fused = chord.moe_w4a16_contiguous(case.x, case.packed, offsets=offsets, swiglu=True)
    gate, up = chord.moe_w4a16_contiguous(case.x, case.packed, offsets=offsets).chunk(2, dim=1)
    unfused = torch.nn.functional.silu(gate) * up
    assert fused[named].numel() > 100_000
    errors = [reference.rms_error(result[named], exact[named]) for result in (fused, unfused)]
    assert errors[0] <= errors[1], errors


@pytest.mark.parametrize("form", grouped.FORMS)
def test_graph_replays_follow_changing_counts(form, device):
    shape, capacity = SHAPES["gated_short_group"][0], 8 * 128
    if form == "masked":
        x = torch.zeros(8, 100, shape.k, dtype=torch.bfloat16, device=device)
    else:
        x = torch.zeros(capacity, shape.k, dtype=torch.bfloat16, device=device)
    start = grouped.grouped_case(shape, form, [1] * 8, device)
    told = start.rows.told_by if form != "m_indices" else torch.full((capacity,), -1, dtype=torch.int32, device=device)
    out = torch.empty(*x.shape[:-1], shape.n // 2, dtype=torch.bfloat16, device=device)

    def step():
        if form == "masked":
            chord.moe_w4a16_masked(x, start.packed, told, expected_rows=20, swiglu=True, out=out)
        else:
            name = form.removeprefix("wide_")
            chord.moe_w4a16_contiguous(x, start.packed, **{name: told}, swiglu=True, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, spread in enumerate(("ragged", "mostly_empty", "none", "one", "full")):
        counts = grouped.draw_counts(spread, 40, shape.experts, seed)
        spare = 100 - max(counts) if form == "masked" else 0
        case = grouped.grouped_case(shape, form, counts, device, swiglu=True, spare_rows=spare, seed=seed)
        fresh = case._replace(packed=start.packed, words=start.words, scales=start.scales)
        if form == "m_indices":
            told.fill_(-1)[: case.expert_of.numel()] = case.rows.told_by
        else:
            told.copy_(case.rows.told_by)
        rows = case.x.view(-1, shape.k)
        x.view(-1, shape.k).fill_(float("nan"))[: rows.shape[0]] = rows
        out.view(torch.int16).fill_(checks.POISON)
        graph.replay()
        expected, named = grouped.expected_of(fresh), (case.expert_of >= 0).to(device)
        got = out.view(-1, shape.n // 2)[: named.numel()]
        if named.any():
            assert reference.rms_error(got[named], expected.exact[named]) <= 1.1 * expected.error + 1e-9
        assert (got.view(torch.int16)[~named] == checks.POISON).all()
        assert (out.view(-1, shape.n // 2)[named.numel() :].view(torch.int16) == checks.POISON).all()


WRONG = {
    "offsets": [[0, 40, 20, 60, -5, 70, 1 << 30, 3, 9], [-9, -8, 0, 900, 0, 900, 5, 5, 2]],
    "wide_offsets": [[0, 1 << 33, 20, -(1 << 40), 60, 1 << 62, 3, 9, 50], [1 << 32, 5, 1 << 32, 9, 0, 1, 2, 3, 4]],
    "masked": [[-1, 1 << 30, 101, -(1 << 31), 100, 0, 1, 7], [1000] * 8],
}


@pytest.mark.parametrize("form", WRONG)
def test_wrong_device_data_writes_no_row_outside(form, device):
    """Neither around the output nor, for slabs, into rows that no clamped count reaches."""
    shape = SHAPES["short_group"][0]
    counts = [100] * 8 if form == "masked" else [8] * 8
    case = grouped.grouped_case(shape, form, counts, device, spare_rows=0)
    case.x.fill_(1)
    for values in WRONG[form]:
        dtype = torch.int64 if form == "wide_offsets" else torch.int32
        wrong = torch.tensor(values, dtype=dtype, device=device)
        bad = case._replace(rows=MaskedRows(wrong) if form == "masked" else ContiguousRows(wrong, None))
        touched = torch.zeros(case.expert_of.numel(), dtype=torch.bool)
        for rows in bad.rows.by_expert(case.x, shape).values():
            touched[rows] = True
        for name in programs(form, device):
            memory, out = run(bad, name)
            torch.cuda.synchronize()
            assert (memory[:8] == checks.POISON).all()
            assert (memory[-8:] == checks.POISON).all()
            assert torch.equal((out.view(torch.int16) != checks.POISON).any(1).cpu(), touched), name


def test_wrong_indices_write_no_row_outside(device):
    shape = SHAPES["short_group"][0]
    case = grouped.grouped_case(shape, "m_indices", [100] * 8, device, spare_rows=7)
    generator = torch.Generator(device=device).manual_seed(1)
    rows = case.expert_of.numel()
    for low, high in ((-3, 12), (-(1 << 31), (1 << 31) - 1), (8, 9)):
        wrong = torch.randint(low, high, (rows,), generator=generator, device=device, dtype=torch.int64).to(torch.int32)
        bad = case._replace(rows=ContiguousRows(None, wrong))
        for name in programs("m_indices", device):
            memory, out = run(bad, name)
            torch.cuda.synchronize()
            assert (memory[:8] == checks.POISON).all()
            assert (memory[-8:] == checks.POISON).all()
            nobody = ((wrong < 0) | (wrong >= shape.experts)).cpu()
            assert (out.view(torch.int16).cpu()[nobody] == checks.POISON).all(), name


def test_slabs_beyond_two_to_the_31(device):
    """2.9 G outputs, of which a few rows are written; the last lie behind 2^31."""
    shape = WeightShape(4, 4096, 64)
    each, counts = 175_000, [3, 0, 1, 175_000]
    words, scales, packed = checks.weights_of(shape, device, 0)
    x = torch.full((4, each, 64), float("nan"), dtype=torch.bfloat16, device=device)
    for expert, count in enumerate(counts):
        x[expert, :count] = torch.randn(count, 64, device=device).to(torch.bfloat16)
    told = torch.tensor(counts, dtype=torch.int32, device=device)
    dense = reference.contract_weights(words, scales).to(torch.float64)
    picked = torch.randint(0, each, (300,), device=device)
    for name in programs("masked", device):
        prepared = chord.prepare_moe_w4a16_masked(x, packed, told, expected_rows=1, program=name)
        prepared.out.fill_(float("nan"))
        prepared()
        want = x[3, picked].to(torch.float64) @ dense[3].T
        assert reference.rms_error(prepared.out[3, picked], want) < 3e-3, name
        assert prepared.out[2, 1:].isnan().all()
        assert not prepared.out[3].view(-1)[::4099].isnan().any(), name
        del prepared


@pytest.mark.parametrize("form", ["wide_offsets", "m_indices"])
def test_sorted_rows_beyond_two_to_the_31(form, device):
    """2.9 G outputs behind one another; the last expert's lie behind 2^31."""
    shape, counts = WeightShape(4, 4096, 64), [3, 0, 128, 700_000]
    words, scales, packed = checks.weights_of(shape, device, 0)
    starts = [0, 3, 3, 131] if form == "wide_offsets" else [0, 128, 128, 256]
    rows = starts[3] + counts[3]
    x = torch.randn(rows, 64, device=device).to(torch.bfloat16)
    if form == "wide_offsets":
        told = {"offsets": torch.tensor([*starts, rows], dtype=torch.int64, device=device)}
    else:
        indices = torch.full((rows,), -1, dtype=torch.int32, device=device)
        for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
            indices[start : start + count] = expert
        told = {"m_indices": indices}
    dense = reference.contract_weights(words, scales).to(torch.float64)
    picked = torch.randint(starts[3], rows, (300,), device=device)
    for name in programs(form, device, shape):
        prepared = chord.prepare_moe_w4a16_contiguous(x, packed, **told, expected_rows=1, program=name)
        prepared.out.fill_(float("nan"))
        prepared()
        want = x[picked].to(torch.float64) @ dense[3].T
        assert reference.rms_error(prepared.out[picked], want) < 3e-3, name
        assert not prepared.out[starts[3] :].view(-1)[::4099].isnan().any(), name
        assert prepared.out[3 : starts[1]].isnan().all(), name
        del prepared


@pytest.mark.parametrize("swiglu", [False, True])
def test_rows_that_a_slab_could_hold_cost_nothing(swiglu, device):
    """A program takes the same time for slabs of 4 and 64 times the rows as for full ones. Where there can be so many,
    one runs that decides on the device: about 3 us more than the one that full slabs of this size select.
    """
    shape, count = WeightShape(48, 4096, 2048, gated=True), 16
    packed = checks.weights_of(shape, device, 0)[2]
    counts = torch.full((shape.experts,), count, dtype=torch.int32, device=device)
    calls, kept = {}, []
    for times in (1, 4, 64):
        x = torch.randn(shape.experts, times * count, shape.k, device=device).to(torch.bfloat16)
        for program in (None, "moe_w4a16_masked.wgmma_r32", "moe_w4a16_masked.wgmma_fit"):
            options = {"expected_rows": count, "swiglu": swiglu, "program": program}
            kept.append(chord.prepare_moe_w4a16_masked(x, packed, counts, **options))
            calls[f"{program} {times}"] = kept[-1].launch
    found = {name: summarize(times).median for name, times in EventTimer(60).measure(calls, 21).items()}
    for program, most in (("moe_w4a16_masked.wgmma_r32", 1.03), ("moe_w4a16_masked.wgmma_fit", 1.03), (None, 1.1)):
        assert max(found[f"{program} 4"], found[f"{program} 64"]) <= most * found[f"{program} 1"], found


@pytest.mark.parametrize("form", grouped.FORMS)
def test_opcheck(form, device):
    case = grouped.grouped_case(SHAPES["gated_short_group"][0], form, [3, 0, 5, 1, 1, 0, 2, 9], device, weighted=True)
    told = (case.rows.counts,) if form == "masked" else (case.rows.offsets, case.rows.m_indices)
    arguments = (case.x, case.packed.data, *told, *case.settings._replace(expert_rows=3, zero_missing=True))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.chord, grouped.FORMS[form]).default, arguments, test_utils=tests)


@pytest.mark.parametrize("form", grouped.FORMS)
def test_a_prepared_launch_gives_the_operators_bits_and_costs_little(form, device):
    case = grouped.grouped_case(WeightShape(8, 256, 256, gated=True), form, [3, 0, 5, 1, 1, 0, 2, 9], device)
    if form == "masked":
        options = {"counts": case.rows.counts, "expected_rows": 3}
        run, prepare = chord.moe_w4a16_masked, chord.prepare_moe_w4a16_masked
    else:
        options = {form.removeprefix("wide_"): case.rows.told_by}
        run, prepare = chord.moe_w4a16_contiguous, chord.prepare_moe_w4a16_contiguous
    want = run(case.x, case.packed, **options, zero_missing=True, validate=True)
    prepared = prepare(case.x, case.packed, **options)
    prepared.out.zero_()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    prepared()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    assert torch.equal(prepared.out, want)
    assert prepared.program.startswith(grouped.FORMS[form] + ".")
    above = []
    for _ in range(3):  # what else the machine does adds to some of them
        times = launch_times(prepared)
        above.append(times.prepared_us - times.bare_us)
    assert min(above) <= 1.0, above


def test_the_layer_gives_sorted_rows_and_slabs_the_bits_of_its_tokens(device):
    shapes = WeightShape(8, 512, 256, gated=True), WeightShape(8, 256, 256)
    packed = [chord.pack_w4a16(*checks.checkpoint(shape, device), gated=shape.gated) for shape in shapes]
    layer, tokens, top_k = chord.W4A16Experts(*packed, profile="h200_grouped_decode"), 33, 4
    generator = torch.Generator(device=device).manual_seed(0)
    x = torch.randn(tokens, 256, generator=generator, device=device).to(torch.bfloat16)
    chosen = torch.rand(tokens, 8, generator=generator, device=device).topk(top_k)
    weights, ids = torch.softmax(chosen.values, 1), chosen.indices.to(torch.int32)
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=8)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows, row_weight = x[order // top_k], weights.flatten()[order]
    plain = layer.forward_contiguous(rows, offsets=offsets)
    routed, summed = torch.empty_like(plain), torch.empty_like(x)
    routed[order] = plain
    combine_rows(routed, summed, weights, ids, num_experts=8)
    assert torch.equal(summed, layer(x, weights, ids))
    got = layer.forward_contiguous(rows, offsets=offsets, row_weight=row_weight)
    slabs, factors = torch.zeros(8, tokens, 256, dtype=torch.bfloat16, device=device), torch.zeros(8, tokens).to(device)
    place = torch.arange(tokens * top_k, device=device) - offsets[:-1].repeat_interleave(counts)
    slabs[ids.flatten()[order].long(), place], factors[ids.flatten()[order].long(), place] = rows, row_weight
    masked = layer.forward_masked(slabs, counts.to(torch.int32), expected_rows=17, row_weight=factors)
    assert torch.equal(masked[ids.flatten()[order].long(), place], got)
