"""Every W4A16 program over shapes, routings and block sizes: values, poison, bits, graphs, streams, large outputs."""

from __future__ import annotations

import pytest
import torch

import chord
from chord._runtime import architecture, registry
from chord.checks import w4a16 as checks
from chord.w4a16 import layout, reference
from chord.w4a16.launch import serves
from chord.w4a16.layout import WeightShape

pytestmark = pytest.mark.gpu

SHAPES = {
    "one_block": WeightShape(1, 64, 64),
    "short_group": WeightShape(8, 320, 192),
    "gated_short_group": WeightShape(8, 448, 320, gated=True),
    "ep8_gate_up": WeightShape(48, 4096, 7168),
    "ep8_down": WeightShape(48, 7168, 2048),
    "tp8_gate_up": WeightShape(384, 512, 7168, gated=True),
    "tp8_down": WeightShape(384, 7168, 256),
    "longest_small_k": WeightShape(16, 1088, 448),
    "tall_tiles_in_turn": WeightShape(384, 64, 256),
    "gated_small_k": WeightShape(24, 448, 384, gated=True),
    "many_experts": WeightShape(1024, 64, 128),
    "qwen3_235b_gate_up": WeightShape(16, 3072, 4096, gated=True),
    "qwen3_235b_tp8_down": WeightShape(128, 4096, 192),
    "glm_4_6_down": WeightShape(20, 5120, 1536),
}
TOKENS = {"one_block": 5, "many_experts": 700, "tall_tiles_in_turn": 7000}
"""The last: some 150 rows an expert, so that a CTA of resident_g2_r192 has tiles of which no two find room at once."""


def programs(device, shape=SHAPES["one_block"]):
    """Those that serve a shape, by name."""
    arch = architecture(device.index)
    found = registry().manifest.operators["moe_w4a16"].programs
    return {
        name: program for name, program in found.items() if arch in program.architectures and serves(program, shape)
    }


@pytest.mark.parametrize("routing", checks.ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_program_is_right_and_writes_nothing_else(shape, routing, device, expect_none):
    problems = []
    blocks = (8, 64) if shape.startswith(("one", "short", "gated")) else (16,)
    for block_m in blocks:
        for swiglu in {False, SHAPES[shape].gated}:
            case = checks.gemm_case(
                SHAPES[shape], TOKENS.get(shape, 50), 8, block_m, routing, device, weighted=block_m != 16, swiglu=swiglu
            )
            expected = checks.Expected.of(case)
            for program in programs(device, SHAPES[shape]):
                problems += checks.gemm_problems(case, expected, program)
    expect_none(problems)


@pytest.mark.parametrize("shape", ["short_group", "gated_short_group", "ep8_down", "tp8_gate_up", "tp8_down"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_few_tokens_are_right(tokens, shape, device, expect_none):
    """Plans that the arms look at in one step, and arms that only calls of few rows select."""
    problems = []
    for block_m, routing in ((8, "random"), (16, "hot"), (8, "remote"), (16, "one")):
        case = checks.gemm_case(
            SHAPES[shape], tokens, 8, block_m, routing, device, weighted=block_m == 8, swiglu=SHAPES[shape].gated
        )
        expected = checks.Expected.of(case)
        for program in programs(device, SHAPES[shape]):
            problems += checks.gemm_problems(case, expected, program)
    expect_none(problems)


@pytest.mark.parametrize("block_m", [8, 16, 24, 32, 40, 48, 56, 64, 72, 128, 256])
def test_every_block_size_is_right(block_m, device, expect_none):
    """Experts with fewer rows than a block, and with several blocks that make one tile or more."""
    problems = []
    for tokens, routing in ((9, "random"), (150, "hot")):
        case = checks.gemm_case(SHAPES["short_group"], tokens, 4, block_m, routing, device, weighted=True)
        expected = checks.Expected.of(case)
        for program in programs(device, SHAPES["short_group"]):
            problems += checks.gemm_problems(case, expected, program)
    expect_none(problems)


@pytest.mark.parametrize("shape", ["short_group", "gated_short_group", "tp8_down"])
def test_programs_of_one_loop_give_equal_bits_and_rows_ignore_their_company(shape, device):
    case = checks.gemm_case(SHAPES[shape], 90, 2, 8, "hot", device)
    results = {}
    for name, program in programs(device, SHAPES[shape]).items():
        memory, out = checks.poisoned_output(case)
        checks.run_program(case, name, out)
        loop = program.constants["loop"]
        assert torch.equal(results.setdefault(loop, memory), memory), name
        for pair in (0, 77, 179):
            alone = torch.full_like(case.expert_of, -1)
            alone[pair] = case.expert_of[pair]
            plan = checks.plan_of(alone, case.packed.shape.experts, 8, device)
            _, single = checks.poisoned_output(case)
            checks.run_program(case, name, single, plan)
            assert torch.equal(single.view(torch.int16)[pair], out.view(torch.int16)[pair]), (name, pair)


@pytest.mark.parametrize("shape", SHAPES)
def test_packing_on_the_gpu_gives_the_same_bytes(shape, device):
    sizes = SHAPES[shape]
    words, scales = checks.checkpoint(WeightShape(min(sizes.experts, 4), sizes.n, sizes.k), device)
    packed = chord.pack_w4a16(words, scales, gated=sizes.gated)
    assert torch.equal(packed.data, layout.pack(words, scales, gated=sizes.gated))
    plain = layout.codes_from_words(words).to(torch.int32)
    assert torch.equal(chord.pack_w4a16(plain, scales, gated=sizes.gated).data, packed.data)
    restored, restored_scales = chord.unpack_w4a16(packed)
    assert torch.equal(restored, words)
    assert torch.equal(restored_scales, scales)
    plain[-1, -1, -1] = 16
    with pytest.raises(ValueError, match="expected 0 to 15"):
        chord.pack_w4a16(plain, scales)


def test_packing_needs_little_more_memory_than_its_result(device):
    words, scales = checks.checkpoint(WeightShape(48, 4096, 7168), device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = chord.pack_w4a16(words, scales)
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * packed.data.nbytes


def test_graph_replays_follow_a_changing_plan(device):
    shape = SHAPES["short_group"]
    case = checks.gemm_case(shape, 64, 4, 8, "random", device)
    plan = chord.allocate_route_plan(64, top_k=4, num_experts=shape.experts, block_m=8, device=device)
    ids = torch.zeros(64, 4, dtype=torch.int32, device=device)
    out = torch.empty(256, shape.n, dtype=torch.bfloat16, device=device)

    def step():
        chord.route_plan(ids, shape.experts, 8, plan=plan)
        chord.moe_w4a16(case.x, case.packed, plan, top_k=4, block_m=8, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        expert_of = checks.draw_experts(("random", "hot", "remote", "one")[seed], 256, shape.experts, seed)
        x = torch.randn(64, shape.k, device=device).to(torch.bfloat16)
        case.x.copy_(x)
        ids.copy_(expert_of.view(64, 4))
        out.view(torch.int16).fill_(checks.POISON)
        graph.replay()
        fresh = case._replace(expert_of=expert_of)
        expected = checks.Expected.of(fresh)
        named = (expert_of >= 0).to(device)
        assert reference.rms_error(out[named], expected.exact[named]) <= 1.1 * expected.error
        assert (out.view(torch.int16)[~named] == checks.POISON).all()


def test_scales_of_any_size_are_exact(device):
    """A power of two in the scales is the same power of two in the result, bit for bit: nothing is rounded twice."""
    shape = SHAPES["gated_short_group"]
    case = checks.gemm_case(shape, 50, 8, 8, "random", device)
    named = case.expert_of >= 0
    for power in (-60, 30):
        packed = chord.pack_w4a16(case.words, case.scales * 2.0**power, gated=shape.gated)
        for name in programs(device, shape):
            _, plain = checks.poisoned_output(case)
            checks.run_program(case, name, plain)
            _, scaled = checks.poisoned_output(case)
            checks.run_program(case._replace(packed=packed), name, scaled)
            assert torch.equal(scaled[named], plain[named] * 2.0**power), (name, power)


@pytest.mark.parametrize("block_m", [8, 64])
@pytest.mark.parametrize("tokens", [190, 2600])
def test_tiles_of_many_widths_are_right_in_any_order(tokens, block_m, device, expect_none):
    """Experts with few rows and with hundreds: tiles of every width, sorted by it, and plans of many chunks."""
    shape = WeightShape(48, 320, 256)
    skewed = (torch.rand(tokens * 4, generator=torch.Generator().manual_seed(tokens)) ** 2 * 48).long()
    case = checks.gemm_case(shape, tokens, 4, block_m, "random", device, weighted=True)
    for strange in (False, True):
        case = case._replace(
            expert_of=skewed, plan=checks.plan_of(skewed, shape.experts, block_m, device, strange=strange)
        )
        expected = checks.Expected.of(case)
        problems = [p for program in programs(device, shape) for p in checks.gemm_problems(case, expected, program)]
        expect_none(problems)


def test_two_streams_do_not_disturb_each_other(device):
    cases = [checks.gemm_case(SHAPES["short_group"], 60, 4, 8, "random", device, seed=seed) for seed in range(2)]
    name = next(iter(programs(device)))
    want = []
    for case in cases:
        memory, out = checks.poisoned_output(case)
        checks.run_program(case, name, out)
        want.append(memory)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = [checks.poisoned_output(case) for case in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, case, (_, out) in zip(streams, cases, got, strict=True):
            with torch.cuda.stream(stream):
                checks.run_program(case, name, out)
    torch.cuda.synchronize()
    assert all(torch.equal(a, memory) for a, (memory, _) in zip(want, got, strict=True))


def test_outputs_beyond_two_to_the_31(device):
    shape = WeightShape(4, 4096, 64)
    case = checks.gemm_case(shape, 70_000, 8, 64, "random", device)
    picked = torch.cat([torch.randint(0, 560_000, (500,)), torch.tensor([0, 559_999])])
    dense = reference.contract_weights(case.words, case.scales).to(torch.float64)
    want = torch.stack([dense[case.expert_of[p]] @ case.x[p // 8].to(torch.float64) for p in picked.tolist()])
    for name in programs(device):
        out = torch.full((560_000, shape.n), float("nan"), dtype=torch.bfloat16, device=device)
        checks.run_program(case, name, out)
        assert reference.rms_error(out[picked.to(device)], want) < 3e-3, name
        assert not out.view(-1)[::4099].isnan().any(), name
        del out


@pytest.mark.parametrize("count", [-8, 0, 1 << 30, (1 << 31) - 1])
def test_a_wrong_length_reads_and_writes_inside_the_buffers(count, device):
    case = checks.gemm_case(SHAPES["short_group"], 33, 4, 8, "random", device)
    plan = case.plan._replace(num_tokens_post_padded=torch.tensor([count], dtype=torch.int32, device=device))
    for name in programs(device):
        memory, out = checks.poisoned_output(case)
        checks.run_program(case, name, out, plan)
        torch.cuda.synchronize()
        assert (memory[:8] == checks.POISON).all()
        assert (memory[-8:] == checks.POISON).all()
        if count <= 0:
            assert (memory == checks.POISON).all()
