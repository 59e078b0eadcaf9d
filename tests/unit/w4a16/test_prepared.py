"""Prepared launches: bound once, the same result as the operator, on torch's current stream."""

import pytest
import torch

import chord
from chord import _runtime
from chord.errors import NoProgramError
from chord.w4a16 import launch
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

    def prepare(self, arguments, *, stream):
        self.prepared.append(dict(arguments))
        return lambda: self.launched.append((dict(arguments), stream() if callable(stream) else stream))


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
    assert all(tensor is None or any(kept is tensor for kept in prepared.keep) for tensor in (*tensors[:2], tensors[4]))


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
    assert values["num_items"] >= values["num_blocks"] * -(-N // 256)


def test_programs_are_found_by_rows_an_expert_and_by_name():
    shape = WeightShape(48, 4096, 7168)
    for interval in chord.route_intervals(4096, 7168, 48, "sm_90a"):
        for rows in (interval.first, min(interval.last, 1 << 40)):
            assert launch.routed_program(shape, rows, "sm_90a") == interval.program
    assert launch.routed_program(shape, 1 << 40, "sm_90a") == launch.routed_program(shape, 1 << 30, "sm_90a")
    with pytest.raises(NoProgramError, match="no such program of moe_w4a16"):
        launch._named_kernel(0, "fused_router.single", shape)
    with pytest.raises(NoProgramError, match="serves k of at most 512, got 7168"):
        launch._named_kernel(0, "moe_w4a16.resident_r64", shape)
