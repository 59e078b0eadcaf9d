"""How router launches behave: graphs, streams, threads, devices, compilation, first use inside a capture."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import chord.router as router
from chord.checks.compare import poison
from chord.checks.inputs import RouterCase, normal_case
from chord.checks.router import (
    Settings,
    check_router,
    poisoned_buffers,
    router_problems,
    run_eager,
    run_prepared,
    spacious_plan,
)

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 16, 33, 130, 600, 2048, 5000)


def capture(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def prepared_on(case, settings):
    buffers = poisoned_buffers(case, settings)
    return buffers, router.prepare_fused_router(
        case.logits, case.bias, top_k=case.top_k, **settings._asdict(), **buffers._asdict()
    )


@pytest.mark.parametrize("tokens", SIZES)
def test_graph_replays_route_new_values(tokens, device, expect_none):
    case, settings = normal_case(tokens, 896, torch.float32, device), Settings(8)
    buffers, prepared = prepared_on(case, settings)
    graph = capture(prepared)
    problems = []
    for seed in range(1, 6):
        fresh = normal_case(tokens, 896, torch.float32, device, seed)
        case.logits.copy_(fresh.logits)
        case.bias.copy_(fresh.bias)
        buffers.topk_weights.fill_(float("nan"))
        poison(buffers.plan)
        graph.replay()
        problems += router_problems(case, settings, buffers)
    expect_none(problems)


def test_a_workspace_serves_thousands_of_launches(device, expect_none):
    """`spread` numbers its launches; after 4095 of them the number reaches a packet's second word."""
    case, settings = normal_case(130, 896, torch.float32, device), Settings(8)
    buffers, prepared = prepared_on(case, settings)
    for _ in range(4094):
        prepared()
    problems = []
    for seed in range(1, 6):
        case.logits.copy_(normal_case(130, 896, torch.float32, device, seed).logits)
        buffers.topk_weights.fill_(float("nan"))
        poison(buffers.plan)
        prepared()
        problems += router_problems(case, settings, buffers)
    expect_none(problems)


@pytest.mark.parametrize("tokens", SIZES)
def test_eager_calls_inside_a_capture(tokens, device, expect_none):
    """The operator allocates inside the graph's pool; a self-resetting workspace belongs to the graph alone.

    Several calls in one graph share it, with other work of the graph between them.
    """
    case, settings = normal_case(tokens, 384, torch.bfloat16, device), Settings(16)
    plan = poisoned_buffers(case, settings).plan
    results = []

    def call():
        for _ in range(3):
            results.append(router.fused_router(case.logits, case.bias, top_k=8, block_m=16, plan=plan))
            torch.full((1 << 18,), 255, dtype=torch.uint8, device=device)

    call()
    graph = capture(call)
    problems = []
    for seed in range(1, 20):
        case.logits.copy_(normal_case(tokens, 384, torch.bfloat16, device, seed).logits)
        poison(plan)
        graph.replay()
        if seed % 3 == 0:  # an eager call between replays must not disturb the graph's workspace, nor be disturbed
            problems += check_router(case, settings)
        problems += router_problems(case, settings, results[-1])
    expect_none(problems)


def test_r14_no_tokens_inside_a_capture(device):
    case = normal_case(0, 896, torch.float32, device)
    buffers, prepared = prepared_on(case, Settings(8))
    graph = capture(prepared)
    buffers.plan.num_tokens_post_padded.fill_(7)
    graph.replay()
    assert buffers.plan.num_tokens_post_padded.tolist() == [0]
    assert router_problems(case, Settings(8), buffers) == []


def test_two_streams_at_once(device, expect_none):
    """Many launches in flight on two streams, each with its own buffers; the eager ones share no workspace."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    problems = []
    for tokens in SIZES:
        work = []
        torch.cuda.synchronize()
        for turn in range(6):
            case = normal_case(tokens, 896, torch.float32, device, seed=turn)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[turn % 2]):
                run = run_eager if turn < 4 else run_prepared
                work.append((case, run(case, Settings(8))))
        torch.cuda.synchronize()
        for case, written in work:
            problems += router_problems(case, Settings(8), written)
    expect_none(problems)


def test_a_prepared_launch_follows_the_current_stream(device):
    case = normal_case(64, 896, torch.float32, device)
    buffers, prepared = prepared_on(case, Settings(8))
    side = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        prepared()
        done = torch.cuda.Event()
        done.record(side)
    assert not done.query(), "the launch waits behind the sleep on its own stream"
    torch.cuda.default_stream(device).synchronize()
    assert not done.query(), "and not on the default stream"
    side.synchronize()
    assert router_problems(case, Settings(8), buffers) == []


def test_the_bare_launch_alone_keeps_its_buffers(device):
    case = normal_case(300, 896, torch.float32, device)
    prepared = router.prepare_fused_router(case.logits.clone(), case.bias.clone(), top_k=16, block_m=8)
    launch, ids, extent = prepared.launch, prepared.topk_ids, prepared.plan.num_tokens_post_padded
    del prepared
    garbage = [torch.full((size,), 1e9, device=device) for size in (case.logits.numel(), 896, 8192) for _ in range(8)]
    launch()
    expected = router.fused_router(case.logits, case.bias, top_k=16, block_m=8)
    assert torch.equal(ids, expected.topk_ids)
    assert torch.equal(extent, expected.plan.num_tokens_post_padded)
    del garbage


def test_two_threads_at_once(device, expect_none):
    """First use and later calls from several threads on one stream, and on streams of their own."""
    problems: list[str] = []
    start = threading.Barrier(4)

    def work(index):
        stream = torch.cuda.Stream(device) if index % 2 else torch.cuda.default_stream(device)
        start.wait()
        with torch.cuda.stream(stream):
            for turn, tokens in enumerate((1, 9, 70, 500, 3000) * 4):
                case = normal_case(tokens, 384, torch.float32, device, seed=100 * index + turn)
                problems.extend(router_problems(case, Settings(24), run_eager(case, Settings(24))))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect_none(problems)


@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("local", [None, range(40, 100)])
def test_r22_opcheck(tokens, local, device):
    case, settings = normal_case(tokens, 896, torch.float32, device), Settings(8, local_experts=local)
    expert_map, count = router.experts.resolve_local_experts(local, 896, device)
    scalars = (case.logits, case.bias, 16, 8, True, 1.0, expert_map, count)
    buffers = poisoned_buffers(case, settings)
    ids = torch.randint(-1, 896, (tokens, 8), dtype=torch.int32, device=device)
    ops = torch.ops.chord
    torch.use_deterministic_algorithms(True)  # torch.empty is filled, so that what an op leaves alone compares equal
    try:
        torch.library.opcheck(ops.fused_router.default, scalars)
        torch.library.opcheck(ops.route_plan.default, (ids, 896, 8, expert_map, count))
        torch.library.opcheck(ops.route_plan_out.default, (ids, 896, 8, expert_map, count, *buffers.plan))
        torch.library.opcheck(
            ops.fused_router_out.default, (*scalars, buffers.topk_weights, buffers.topk_ids, *buffers.plan)
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("own_plan", [False, True])
def test_r22_compiled_equals_eager(own_plan, device):
    def layer(logits, bias, plan):
        output = router.fused_router(logits * 2, bias, top_k=16, block_m=8, plan=plan)
        return output.topk_weights, output.topk_ids, output.plan

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (17, 33, 300, 1, 0):
        case = normal_case(tokens, 896, torch.float32, device)
        plans = [spacious_plan(tokens, 16, 896, 8, device) if own_plan else None for _ in range(2)]
        want, got = layer(case.logits, case.bias, plans[0]), compiled(case.logits, case.bias, plans[1])
        doubled = RouterCase("doubled", case.logits * 2, case.bias)
        assert torch.equal(want[0], got[0])
        assert torch.equal(want[1], got[1])
        if own_plan:
            assert all(torch.equal(a, b) for a, b in zip(plans[0], plans[1], strict=True))
            buffers = poisoned_buffers(doubled, Settings(8))._replace(topk_weights=got[0], topk_ids=got[1], plan=got[2])
            assert router_problems(doubled, Settings(8), buffers) == []


def test_r05_other_devices_are_named(device):
    case = normal_case(4, 896, torch.float32, device)
    with pytest.raises(ValueError, match=r"logits on cuda:\d, bias on cpu"):
        router.fused_router(case.logits, case.bias.cpu(), top_k=16, block_m=8)
    with pytest.raises(ValueError, match=r"logits on cpu, bias on cuda:\d"):
        router.fused_router(case.logits.cpu(), case.bias, top_k=16, block_m=8)
    plan = poisoned_buffers(case, Settings(8)).plan
    elsewhere = plan._replace(expert_counts=plan.expert_counts.cpu())
    with pytest.raises(ValueError, match=r"plan.expert_counts on cpu"):
        router.fused_router(case.logits, case.bias, top_k=16, block_m=8, plan=elsewhere)
    ids = torch.zeros(4, 8, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"topk_ids on cuda:\d, local_experts on cpu"):
        router.route_plan(ids, 48, 8, local_experts=torch.zeros(48, dtype=torch.int32), num_local_experts=1)


@pytest.mark.gpu(count=2)
def test_r05_a_device_that_is_not_the_current_one(expect_none):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    problems = []
    with torch.cuda.device(first):
        for tokens in SIZES:
            case = normal_case(tokens, 896, torch.float32, second)
            problems += check_router(case, Settings(8))
            problems += router_problems(case, Settings(8), run_eager(case, Settings(8)))
            side = torch.cuda.Stream(second)
            side.wait_stream(torch.cuda.current_stream(second))
            with torch.cuda.stream(side):
                problems += router_problems(case, Settings(8), run_eager(case, Settings(8)))
            assert torch.cuda.current_device() == 0
        case = normal_case(4, 896, torch.float32, first)
        with pytest.raises(ValueError, match="logits on cuda:0, bias on cuda:1"):
            router.fused_router(case.logits, case.bias.to(second), top_k=16, block_m=8)
    expect_none(problems)


def test_r19_strided_inputs_are_refused(device):
    wide = torch.randn(6, 1792, device=device)
    bias = torch.zeros(896, device=device)
    for logits in (wide[:, :896], torch.randn(896, 6, device=device).t(), wide[:, ::2], wide[:1, :896].expand(6, 896)):
        for function in (router.fused_router, router.prepare_fused_router):
            with pytest.raises(ValueError, match=r"logits: expected a contiguous tensor, got strides"):
                function(logits, bias, top_k=16, block_m=8)


def run_fresh(code):
    """Runs code in a fresh process; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_r20_first_use_inside_a_capture():
    """Without a warm-up capture works and replays are right, or an error says what to preload and then it does."""
    printed = run_fresh("""
        import torch
        from chord.checks.compare import poison
        from chord.checks.inputs import normal_case
        from chord.checks.router import Settings, poisoned_buffers, router_problems
        from chord.errors import CaptureError
        from chord.router import fused_router
        from chord import _runtime
        device = torch.device("cuda", 0)
        case, settings = normal_case(300, 896, torch.float32, device), Settings(8)
        plan = poisoned_buffers(case, settings).plan
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                output = fused_router(case.logits, case.bias, top_k=16, block_m=8, plan=plan)
        except CaptureError as error:
            assert "preload" in str(error), error
            _runtime.registry().preload("fused_router", {"num_tokens": 300})
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = fused_router(case.logits, case.bias, top_k=16, block_m=8, plan=plan)
        for seed in range(100):
            case.logits.copy_(normal_case(300, 896, torch.float32, device, seed).logits)
            poison(plan)
            graph.replay()
        print(router_problems(case, settings, output))
    """)
    assert printed.strip() == "[]"


def test_r20_loading_while_another_thread_captures():
    printed = run_fresh("""
        import threading
        import torch
        from chord.checks.inputs import normal_case
        from chord.checks.router import Settings, check_router, poisoned_buffers, router_problems
        from chord.router import prepare_fused_router
        device = torch.device("cuda", 0)
        case, settings = normal_case(4, 896, torch.float32, device), Settings(8)
        other = normal_case(5000, 384, torch.float32, device)
        buffers = poisoned_buffers(case, settings)
        prepared = prepare_fused_router(case.logits, case.bias, top_k=16, **settings._asdict(), **buffers._asdict())
        outputs = poisoned_buffers(other, settings)
        torch.cuda.synchronize()
        loaded = []
        def load():
            loaded.append(prepare_fused_router(other.logits, other.bias, top_k=8, block_m=8, plan=outputs.plan,
                                               topk_weights=outputs.topk_weights, topk_ids=outputs.topk_ids))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            prepared()
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
            prepared()
        graph.replay()
        loaded[0]()
        print(router_problems(case, settings, buffers) + router_problems(other, settings, outputs))
    """)
    assert printed.strip() == "[]"
