"""Prepared launches: bound once, the same result as the operator, on torch's current stream."""

import pytest
import torch

import chord
from chord import _runtime
from chord.errors import NoProgramError
from chord.w4a16 import launch
from chord.w4a16.grouped_ops import Settings, gemm_values
from chord.w4a16.grouped_rows import ContiguousRows, MaskedRows
from chord.w4a16.layout import WeightShape, words_from_codes

EXPERTS, N, K, TOKENS, TOP_K = 4, 128, 64, 6, 2


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (EXPERTS, N, K), generator=generator, dtype=torch.int32)
    scale = (torch.rand(EXPERTS, N, K // 32, generator=generator) * 0.04 + 0.005).to(torch.bfloat16)
    x = torch.randn(TOKENS, K, generator=generator).to(torch.bfloat16)
    ids = torch.randint(0, EXPERTS, (TOKENS, TOP_K), generator=generator, dtype=torch.int32)
    return x, chord.pack_w4a16(words_from_codes(codes), scale), chord.route_plan(ids, EXPERTS, 8)


FITS = "low_mean"  # the constant of programs that decide on the device


def test_a_prepared_call_does_what_the_operator_does(problem):
    x, packed, plan = problem
    x = x.clone()
    prepared = chord.prepare_moe_w4a16(x, packed, plan, top_k=TOP_K, block_m=8, zero_missing=True)
    assert prepared.program == "reference"
    for factor in (1, 3):
        x.mul_(factor)
        prepared.out.fill_(7)
        prepared()
        assert torch.equal(prepared.out, chord.moe_w4a16(x, packed, plan, top_k=TOP_K, block_m=8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": True}, TypeError, "top_k: expected an int"),
        ({"out": torch.empty(1, N, dtype=torch.bfloat16)}, ValueError, r"out: expected shape \[12, 128\]"),
        ({"row_weight": torch.ones(3)}, ValueError, r"row_weight: expected shape \[12\]"),
        ({"expected_rows": -1}, ValueError, "expected_rows: expected at least 0"),
    ],
)
def test_arguments_are_checked_when_it_is_prepared(problem, change, error, message):
    with pytest.raises(error, match=message):
        chord.prepare_moe_w4a16(*problem, **({"top_k": TOP_K, "block_m": 8} | change))
    with pytest.raises(TypeError, match=r"packed: expected a chord\.PackedW4A16"):
        chord.prepare_moe_w4a16(problem[0], problem[1].data, problem[2], top_k=TOP_K, block_m=8)


class FakeKernel:
    """Stands in for registry.Kernel: notes what it is given and when it runs."""

    name = "moe_w4a16.fake"

    def __init__(self):
        self.prepared, self.launched = [], []

    def prepare(self, arguments, *, stream, owners=None):
        self.prepared.append(dict(arguments))
        self.owners = owners

        def launch():
            self.launched.append((dict(arguments), stream() if callable(stream) else stream))

        launch.make_ready = lambda stream: None
        return launch


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU whose memory is the host's, with one kernel; `stream` can be set."""

    class State:
        stream, kernel = 7, FakeKernel()

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: State.stream, raising=False)
    monkeypatch.setattr(launch, "_chosen", lambda *arguments: State.kernel)
    launch._bound.cache_clear()
    return State


def bound(problem, **more):
    x, packed, plan = problem
    out = torch.empty(TOKENS * TOP_K, N, dtype=torch.bfloat16)
    return (x, packed.data, plan[:3], None, out, packed.shape), {"top_k": TOP_K, "block_m": 8, **more}


def test_a_prepared_launch_follows_the_stream_and_binds_once(problem, gpu):
    tensors, scalars = bound(problem, expert_rows=3, invariant=False)
    prepared = launch.prepare_gemm(*tensors, **scalars)
    for stream in (7, 8):
        gpu.stream = stream
        prepared.launch()
    assert [stream for _, stream in gpu.kernel.launched] == [7, 8]
    assert len(gpu.kernel.prepared) == 1
    assert prepared.program == "moe_w4a16.fake"
    buffers = (*tensors[:2], *tensors[2], tensors[4])
    assert all(any(kept is tensor for kept in gpu.kernel.owners) for tensor in buffers)


def test_equal_operator_calls_bind_once_a_stream(problem, gpu):
    tensors, scalars = bound(problem, expert_rows=3, invariant=False)
    for stream in (7, 7, 8, 7):
        gpu.stream = stream
        launch.gemm(*tensors, **scalars)
    assert [stream for _, stream in gpu.kernel.launched] == [7, 7, 8, 7]
    assert len(gpu.kernel.prepared) == 2


def test_values_are_the_manifests_arguments(problem):
    tensors, scalars = bound(problem)
    values = launch.gemm_values(*tensors, **scalars)
    for arm in _runtime.operator("moe_w4a16").arms.values():
        assert [arg.name for arg in arm.args] == list(values)
    assert values["num_items"] >= values["num_blocks"] * (N // 64)


@pytest.mark.parametrize("operator", [launch.CONTIGUOUS, launch.MASKED])
def test_grouped_values_are_the_manifests_arguments(problem, operator):
    _, packed, _ = problem
    if operator == launch.MASKED:
        x, rows = torch.empty(EXPERTS, 40, K, dtype=torch.bfloat16), MaskedRows(torch.zeros(EXPERTS, dtype=torch.int32))
    else:
        x = torch.empty(4 * 40, K, dtype=torch.bfloat16)
        rows = ContiguousRows(torch.zeros(EXPERTS + 1, dtype=torch.int64), None)
    out = torch.empty(*x.shape[:-1], N, dtype=torch.bfloat16)
    values = gemm_values(x, packed.data, rows, out, packed.shape, Settings(None, False, False, 3, False, False))
    for arm in _runtime.operator(operator).arms.values():
        assert {arg.name for arg in arm.args} == set(values)
    assert values["num_items"] >= EXPERTS * 2 * (N // 64), "two tiles of 32 rows, of 40 an expert"
    assert values.get("wide_offsets", 1) == 1


def test_grouped_calls_launch_once_bound_and_follow_the_stream(problem, gpu, monkeypatch):
    _, packed, _ = problem
    x, counts = torch.empty(EXPERTS, 8, K, dtype=torch.bfloat16), torch.zeros(EXPERTS, dtype=torch.int32)
    out, rows = torch.empty(EXPERTS, 8, N, dtype=torch.bfloat16), MaskedRows(counts)
    values = gemm_values(x, packed.data, rows, out, packed.shape, Settings(None, False, False, 3, False, False))
    for stream in (7, 8, 7):
        gpu.stream = stream
        launch.launch(rows.operator, values, 0, packed.shape, 3, False)
    prepared = launch.prepare(rows.operator, values, 0, packed.shape, 3, False, None, (x, out))
    prepared.launch()
    assert [stream for _, stream in gpu.kernel.launched] == [7, 8, 7, 7]
    assert len(gpu.kernel.prepared) == 3


def test_grouped_operators_have_the_arms_of_the_indexed_one():
    indexed = _runtime.operator(launch.OPERATOR)
    for name in (launch.CONTIGUOUS, launch.MASKED):
        operator = _runtime.operator(name)
        for program in operator.programs.values():
            twin = indexed.programs[f"{launch.OPERATOR}.{program.arm}"]
            assert program.constants == twin.constants
            assert set(program.builds) == set(twin.builds)
        for shape in (WeightShape(24, 4096, 7168), WeightShape(12, 7168, 2048), WeightShape(384, 7168, 256)):
            size = (shape.n, shape.k, shape.experts, "sm_90a")
            routes, twins = chord.route_intervals(*size, name), chord.route_intervals(*size)
            routes = [r._replace(program=r.program.replace(name, launch.OPERATOR)) for r in routes]
            if name == launch.MASKED:  # slabs are mostly empty: their routes may leave more to the device
                routes = [
                    r for r in routes if FITS not in _runtime.operator(launch.OPERATOR).programs[r.program].constants
                ]
                assert {r.program for r in routes} == {t.program for t in twins}
            else:
                assert routes == twins
    with pytest.raises(ValueError, match="operator: expected one of moe_w4a16, moe_w4a16_contiguous, moe_w4a16_masked"):
        chord.route_intervals(4096, 7168, 48, "sm_90a", "route_plan")
    with pytest.raises(ValueError, match="all_rows: expected with moe_w4a16 alone, moe_w4a16_masked has no routes"):
        chord.route_intervals(4096, 7168, 48, "sm_90a", launch.MASKED, all_rows=8)


def admits(program, rows):
    """Whether a program's tiles are chosen on the device, or are the ones for so many rows an expert."""
    shape = WeightShape(48, 4096, 7168)
    operator, _, arm = program.partition(".")
    fits = FITS in _runtime.operator(operator).programs[program].constants
    return fits or arm == launch.routed_program(shape, rows, "sm_90a").partition(".")[2]


def test_an_expectation_below_what_can_be_is_left_to_the_device():
    """A program for few rows runs only where there cannot be many on average, whatever a caller says."""
    shape = WeightShape(48, 4096, 7168)
    for operator in (launch.OPERATOR, launch.CONTIGUOUS, launch.MASKED):
        for most in (1, 22, 23, 59, 60, 176, 4096, 1 << 40):
            for hint in (0, 1, 22, 23, 59, 60, 400, 1 << 40):
                program = launch.routed_program(shape, hint, "sm_90a", operator, most_rows=most)
                assert admits(program, most), (operator, most, hint, program)
            exact = launch.routed_program(shape, most, "sm_90a", operator, most_rows=most)
            assert exact == launch.routed_program(shape, most, "sm_90a", operator)
            assert operator == launch.MASKED or FITS not in _runtime.operator(operator).programs[exact].constants
    listed = chord.route_intervals(4096, 7168, 48, "sm_90a", most_rows=400)
    assert [(i.first, i.last) for i in listed] == [(0, 59), (60, launch.MAX_EXPERT_ROWS)]
    assert FITS in _runtime.operator(launch.OPERATOR).programs[listed[0].program].constants


def test_what_an_expert_can_have_follows_from_the_arguments():
    shape = WeightShape(48, 4096, 7168)
    assert launch.most_rows({"num_rows": 50, "top_k": 8}, shape) == 9
    assert launch.most_rows({"num_rows": 400}, shape) == 9
    assert launch.most_rows({"num_rows": 384}, shape) == 8
    assert launch.most_rows({"rows_each": 256}, shape) == 256


def test_few_rows_in_all_have_a_program_of_their_own_for_plans():
    few, arch = "moe_w4a16.turns_r16", "sm_90a"
    assert launch.few_arms(arch) == {"turns_r16"}
    for n, k, experts in ((512, 7168, 384), (4096, 7168, 48), (64, 576, 1)):
        shape = WeightShape(experts, n, k)
        for hint in (0, 1, 30, 1 << 40):
            assert launch.routed_program(shape, hint, arch, most_rows=1, all_rows=16) == few
            assert launch.routed_program(shape, hint, arch, most_rows=1, all_rows=17) != few
        assert launch.routed_program(shape, 1, arch, "moe_w4a16_contiguous", most_rows=1) != few
    small = WeightShape(384, 7168, 256)
    assert launch.routed_program(small, 1, arch, all_rows=16) == "moe_w4a16.wgmma_r32"
    assert launch.routed_program(small, 1, arch, all_rows=17) == "moe_w4a16.resident_g4_r64"
    assert launch.routed_program(WeightShape(384, 512, 7168), 1, "sm_100a", all_rows=1) == "moe_w4a16.mma_r32"
    assert [launch.all_rows({"num_rows": rows, "top_k": 8}) for rows in (0, 1, 2, 3, 1 << 27)] == [0, 8, 16, 17, 17]


def test_programs_are_found_by_rows_an_expert_and_by_name():
    shape = WeightShape(48, 4096, 7168)
    for interval in chord.route_intervals(4096, 7168, 48, "sm_90a"):
        for rows in (interval.first, min(interval.last, 1 << 40)):
            assert launch.routed_program(shape, rows, "sm_90a") == interval.program
    assert launch.routed_program(shape, 1 << 40, "sm_90a") == launch.routed_program(shape, 1 << 30, "sm_90a")
    with pytest.raises(NoProgramError, match="no such program of moe_w4a16"):
        launch._named_kernel("moe_w4a16", 0, "fused_router.solo", shape)
    with pytest.raises(NoProgramError, match="serves k of at most 448, got 7168"):
        launch._named_kernel("moe_w4a16", 0, "moe_w4a16.resident_g4_r64", shape)
