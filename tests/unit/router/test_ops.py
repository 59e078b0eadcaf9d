"""The torch custom ops on a CPU: fake against real, opcheck, full-graph compilation with a symbolic token count."""

from __future__ import annotations

import pytest
import torch

import chord.router as router
from chord.checks.compare import check_plan
from chord.checks.inputs import expert_parallel_ids, normal_case
from chord.checks.router import Settings, poisoned_buffers, router_problems, run_eager, run_prepared
from chord.router.experts import expert_map_of

CPU = torch.device("cpu")
OPS = torch.ops.chord


@pytest.fixture
def filled_memory():
    """torch.empty gives a constant, so that entries which an op leaves alone compare equal between two runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def routed(tokens, dtype=torch.float32, experts=896):
    case = normal_case(tokens, experts, dtype, CPU)
    return case, (case.logits, case.bias, case.top_k, 8, True, 1.0)


def without_device(call):
    """Runs `call` on fake tensors; returns the fake result."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(mode.from_tensor)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("local", [None, range(40, 100)])
def test_r22_fake_equals_real(tokens, dtype, local):
    case, scalars = routed(tokens, dtype)
    expert_map = None if local is None else expert_map_of(local, 896, CPU)
    tail = (*scalars[2:], expert_map, 896 if local is None else len(local))
    real = OPS.fused_router(case.logits, case.bias, *tail)
    fake = without_device(lambda enter: OPS.fused_router(enter(case.logits), enter(case.bias), *tail))
    plan = OPS.route_plan(real[1], 896, 16, *tail[-2:])
    fake_plan = without_device(lambda enter: OPS.route_plan(enter(real[1]), 896, 16, *tail[-2:]))
    for want, got in zip((*real, *plan), (*fake, *fake_plan), strict=True):
        assert (want.shape, want.stride(), want.dtype, want.device) == (got.shape, got.stride(), got.dtype, got.device)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("local", [None, range(40, 100)])
def test_r22_opcheck(filled_memory, tokens, local):
    case, scalars = routed(tokens)
    expert_map = None if local is None else expert_map_of(local, 896, CPU)
    experts = (expert_map, 896 if local is None else len(local))
    buffers = poisoned_buffers(case, Settings(local_experts=local))
    torch.library.opcheck(OPS.fused_router.default, (*scalars, *experts))
    torch.library.opcheck(
        OPS.fused_router_out.default, (*scalars, *experts, buffers.topk_weights, buffers.topk_ids, *buffers.plan)
    )
    ids = expert_parallel_ids(tokens, 8, 896, CPU)
    torch.library.opcheck(OPS.route_plan.default, (ids, 896, 8, *experts))
    torch.library.opcheck(OPS.route_plan_out.default, (ids, 896, 8, *experts, *buffers.plan))


def test_r22_writing_ops_declare_what_they_write():
    for name, untouched in (("fused_router_out", 8), ("route_plan_out", 5)):
        arguments = getattr(OPS, name).default._schema.arguments
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        assert written == [False] * untouched + [True] * (len(arguments) - untouched)


@pytest.mark.parametrize("own_plan", [False, True])
def test_r22_compiles_to_one_graph_with_symbolic_tokens(own_plan):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def layer(logits, bias, plan):
        output = router.fused_router(logits * 2, bias, top_k=16, block_m=8, local_experts=range(448), plan=plan)
        again = router.route_plan(output.topk_ids, 896, 16)
        return output.topk_weights + 1, output.topk_ids, output.plan, again

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (17, 33, 40):
        case, _ = routed(tokens)
        settings = Settings(local_experts=range(448))
        plans = [poisoned_buffers(case, settings).plan if own_plan else None for _ in range(2)]
        want, got = layer(case.logits, case.bias, plans[0]), compiled(case.logits, case.bias, plans[1])
        assert torch.equal(want[0], got[0])
        assert torch.equal(want[1], got[1])
        extent = want[2].num_tokens_post_padded.item()
        assert torch.equal(want[2].sorted_token_ids[:extent], got[2].sorted_token_ids[:extent])
        if own_plan:
            assert got[2].expert_counts is plans[1].expert_counts
            assert check_plan(plans[1], got[1], 896, 8, expert_map_of(range(448), 896, CPU)) == []
    assert len(graphs) == 1, "one graph serves every token count"


@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_r22_aot_compiled_equals_eager(tokens):
    def layer(logits, bias):
        return router.fused_router(logits, bias, top_k=16, block_m=16)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    case, _ = routed(tokens)
    want, got = layer(case.logits, case.bias), compiled(case.logits, case.bias)
    assert torch.equal(want.topk_weights, got.topk_weights)
    assert torch.equal(want.topk_ids, got.topk_ids)
    assert torch.equal(want.plan.expert_offsets, got.plan.expert_offsets)


def test_nothing_is_differentiable(filled_memory):
    case, scalars = routed(4)
    logits, bias = (tensor.clone().requires_grad_() for tensor in (case.logits, case.bias))
    eager = router.fused_router(logits, bias, top_k=16, block_m=8)
    own_plan = router.fused_router(logits, bias, top_k=16, block_m=8, plan=eager.plan)
    prepared = router.prepare_fused_router(logits, bias, top_k=16, block_m=8)
    prepared()
    layer = torch.compile(
        lambda a, b: router.fused_router(a * 2, b, top_k=16, block_m=8), fullgraph=True, backend="aot_eager"
    )
    results = [eager.topk_weights, own_plan.topk_weights, prepared.topk_weights, layer(logits, bias).topk_weights]
    assert [(result.requires_grad, result.grad_fn) for result in results] == [(False, None)] * 4
    assert torch.equal(eager.topk_weights, router.fused_router(*scalars[:2], top_k=16, block_m=8).topk_weights)
    torch.library.opcheck(OPS.fused_router.default, (logits, bias, *scalars[2:], None, 896))
    out = torch.empty(4, 16, requires_grad=True)  # a leaf, which autograd would not let an operation write
    arguments = (logits, bias, *scalars[2:], None, 896, out, eager.topk_ids, *eager.plan)
    OPS.fused_router_out(*arguments)
    assert out.is_leaf
    assert torch.equal(out, eager.topk_weights)


@pytest.mark.parametrize("factor", [float("inf"), float("-inf"), float("nan"), 3.5e38, -1e300, 10**400])
def test_a_factor_that_is_no_float32_is_refused(factor):
    _, scalars = routed(2)
    calls = [
        lambda: router.fused_router(*scalars[:2], top_k=16, block_m=8, routed_scaling_factor=factor),
        lambda: router.prepare_fused_router(*scalars[:2], top_k=16, block_m=8, routed_scaling_factor=factor),
    ]
    if isinstance(factor, float):  # others do not reach an op
        calls.append(lambda: OPS.fused_router(*scalars[:5], factor, None, 896))
    for call in calls:
        with pytest.raises(ValueError, match="routed_scaling_factor: expected a finite float32, got"):
            call()


def test_tracing_reports_the_same_errors():
    case, _ = routed(4)
    with pytest.raises(ValueError, match="block_m: expected a multiple of 8"):
        without_device(lambda enter: router.fused_router(enter(case.logits), enter(case.bias), top_k=16, block_m=12))


@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
@pytest.mark.parametrize(
    "settings", [Settings(), Settings(24, False, 2.5), Settings(256, local_experts=range(0, 384, 8))]
)
def test_eager_and_prepared_give_the_reference(tokens, settings):
    case = normal_case(tokens, 384, torch.bfloat16, CPU)
    assert router_problems(case, settings, run_eager(case, settings)) == []
    assert router_problems(case, settings, run_prepared(case, settings, launches=2)) == []


def test_r14_no_tokens():
    """Shapes (0, k), an extent written as 0, and the rest of the plan untouched."""
    case = normal_case(0, 384, torch.float32, CPU)
    buffers = run_eager(case, Settings())
    assert buffers.topk_ids.shape == (0, 8) == buffers.topk_weights.shape
    assert buffers.plan.num_tokens_post_padded.tolist() == [0]
    assert router_problems(case, Settings(), buffers) == []
    fresh = router.fused_router(case.logits, case.bias, top_k=8, block_m=8)
    assert fresh.plan.sorted_token_ids.shape == fresh.plan.expert_ids.shape == (0,)
    plan = router.route_plan(torch.empty(0, 8, dtype=torch.int32), 48, 8)
    assert plan.expert_offsets.tolist() == [0] * 49


def test_prepared_launch_reads_inputs_again():
    case = normal_case(5, 896, torch.float32, CPU)
    prepared = router.prepare_fused_router(case.logits, case.bias, top_k=16, block_m=8)
    prepared()
    first = prepared.topk_ids.clone()
    case.logits.copy_(case.logits.flip(1))
    prepared()
    assert prepared.program == "reference"
    assert torch.equal(prepared.topk_ids, router.fused_router(case.logits, case.bias, top_k=16, block_m=8).topk_ids)
    assert not torch.equal(prepared.topk_ids, first)


def test_map_made_in_inference_mode():
    case, _ = routed(3)
    with torch.inference_mode():
        local = torch.full((896,), -1, dtype=torch.int32)
        local[:4] = torch.arange(4, dtype=torch.int32)
        output = router.fused_router(case.logits, case.bias, top_k=16, block_m=8, local_experts=local)
    assert output.plan.expert_counts.shape == (4,)


def test_r12_row_bits_do_not_depend_on_the_batch():
    case = normal_case(40, 896, torch.float32, CPU)
    alone = router.fused_router(case.logits[:1].clone(), case.bias, top_k=16, block_m=8)
    together = router.fused_router(case.logits, case.bias, top_k=16, block_m=8)
    assert torch.equal(alone.topk_weights[0], together.topk_weights[0])
    assert torch.equal(alone.topk_ids[0], together.topk_ids[0])
