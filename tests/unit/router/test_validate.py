"""Every argument error names the argument, what was expected and what was found, and comes before anything is
written.
"""

from __future__ import annotations

import pytest
import torch

import chord.router as router
from chord.checks.compare import POISON
from chord.checks.inputs import normal_case
from chord.checks.router import Settings, poisoned_buffers
from chord.router.validate import check_memory

CPU = torch.device("cpu")
TOKENS = 6


@pytest.fixture
def call():
    """Valid arguments of a router call into poisoned buffers, to be spoiled one at a time."""
    case = normal_case(TOKENS, 384, torch.float32, CPU)
    plan = poisoned_buffers(case, Settings(), spare=0).plan
    return {"logits": case.logits, "bias": case.bias, "top_k": 8, "block_m": 8, "plan": plan}


def misaligned(tensor):
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return room.copy_(tensor)


FAULTS = {
    "logits float64": (
        {"logits": lambda a: a.double()},
        r"logits: expected .*float32 or .*bfloat16, got torch.float64",
    ),
    "logits float16": ({"logits": lambda a: a.half()}, r"logits: expected .* got torch.float16"),
    "logits 1-D": ({"logits": lambda a: a[0]}, r"logits: expected shape \[any, any\], got \[384\]"),
    "logits transposed": ({"logits": lambda a: a.t().contiguous().t()}, r"logits: .* strides \(1, 6\)"),
    "logits columns": ({"logits": lambda a: a[:, ::2].contiguous()}, r"logits, top_k: .* got logits of 192 experts"),
    "bias bfloat16": ({"bias": lambda a: a.bfloat16()}, r"bias: expected torch.float32, got torch.bfloat16"),
    "bias too long": ({"bias": lambda _: torch.zeros(896)}, r"bias: expected shape \[384\], got \[896\]"),
    "bias strided": ({"bias": lambda _: torch.zeros(768)[::2]}, r"bias: .* strides \(2,\)"),
    "bias expanded": ({"bias": lambda _: torch.zeros(1).expand(384)}, r"bias: .* strides \(0,\)"),
    "bias elsewhere": ({"bias": lambda a: a.to("meta")}, r"logits on cpu, bias on meta"),
    "top_k": ({"top_k": lambda _: 16}, r"top_k: .*384 experts with top_k 8; got logits of 384 experts with top_k 16"),
    "block_m 0": ({"block_m": lambda _: 0}, r"block_m: expected 8 to 256, got 0"),
    "block_m 12": ({"block_m": lambda _: 12}, r"block_m: expected a multiple of 8 up to 256, got 12"),
    "block_m 264": ({"block_m": lambda _: 264}, r"block_m: expected 8 to 256, got 264"),
    "logits misaligned": ({"logits": misaligned}, r"logits: expected an address that is a multiple of 16 bytes"),
    "bias misaligned": ({"bias": misaligned}, r"bias: expected an address .*\(off by 4\)"),
}

PLAN_FAULTS = {
    "counts too long": (
        "expert_counts",
        lambda a: torch.cat([a, a]),
        r"plan.expert_counts: expected shape \[384\], got \[768\]",
    ),
    "offsets too short": (
        "expert_offsets",
        lambda a: a[:-1],
        r"plan.expert_offsets: expected shape \[385\], got \[384\]",
    ),
    "sorted int64": (
        "sorted_token_ids",
        lambda a: a.long(),
        r"plan.sorted_token_ids: expected torch.int32, got torch.int64",
    ),
    "sorted strided": (
        "sorted_token_ids",
        lambda a: torch.cat([a, a])[::2],
        r"plan.sorted_token_ids: .* strides \(2,\)",
    ),
    "one slot short": (
        "sorted_token_ids",
        lambda a: a[:-1],
        r"plan.sorted_token_ids: expected at least 384 .* got 383",
    ),
    "one block short": ("expert_ids", lambda a: a[:-1], r"plan.expert_ids: expected at least 48 .* got 47"),
    "extent missing": (
        "num_tokens_post_padded",
        lambda a: a[:0],
        r"plan.num_tokens_post_padded: expected shape \[1\], got \[0\]",
    ),
    "elsewhere": (
        "expert_ids",
        lambda a: a.to("meta"),
        r"expected all tensors on one device, .*plan.expert_ids on meta",
    ),
    "misaligned": ("expert_counts", misaligned, r"plan.expert_counts: expected an address"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_inputs(call, fault):
    changes, message = FAULTS[fault]
    arguments = dict(call, **{name: change(call[name]) for name, change in changes.items()})
    with pytest.raises(ValueError, match=message):
        router.fused_router(arguments.pop("logits"), arguments.pop("bias"), **arguments)
    assert all((tensor == POISON).all() for tensor in call["plan"]), "nothing may be written before an error"


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_bad_plans(call, fault):
    name, change, message = PLAN_FAULTS[fault]
    plan = call["plan"]._replace(**{name: change(getattr(call["plan"], name))})
    for function in (router.fused_router, router.prepare_fused_router):
        with pytest.raises(ValueError, match=message):
            function(call["logits"], call["bias"], top_k=8, block_m=8, plan=plan)


def test_wrong_kinds(call):
    logits, bias = call["logits"], call["bias"]
    with pytest.raises(TypeError, match=r"plan: expected a chord.RoutePlan .* got tuple"):
        router.fused_router(logits, bias, top_k=8, block_m=8, plan=tuple(call["plan"]))
    spoiled = call["plan"]._replace(expert_ids=[0])
    with pytest.raises(TypeError, match=r"plan.expert_ids: expected a torch.Tensor, got list"):
        router.prepare_fused_router(logits, bias, top_k=8, block_m=8, plan=spoiled)
    with pytest.raises(TypeError, match=r"logits: expected a torch.Tensor, got list"):
        router.fused_router([[0.0]], bias, top_k=8, block_m=8)
    with pytest.raises(TypeError, match=r"local_experts: expected a range or an int32 tensor, got list"):
        router.fused_router(logits, bias, top_k=8, block_m=8, local_experts=[1, 2])
    with pytest.raises(TypeError, match=r"block_m: expected an int, got True \(bool\)"):
        router.allocate_route_plan(1, top_k=8, num_experts=384, block_m=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_k", "8", r"top_k: expected an int, got '8' \(str\)"),
        ("top_k", 8.0, r"top_k: expected an int, got 8.0 \(float\)"),
        ("block_m", 8.0, r"block_m: expected an int, got 8.0 \(float\)"),
        ("renormalize", None, r"renormalize: expected a bool, got None"),
        ("renormalize", "no", r"renormalize: expected a bool, got 'no'"),
        ("routed_scaling_factor", "2", r"routed_scaling_factor: expected a number, got '2'"),
        ("routed_scaling_factor", torch.tensor(2.0), r"routed_scaling_factor: expected a number, got tensor"),
    ],
)
def test_wrong_kinds_of_settings(call, name, value, message):
    settings = {"top_k": 8, "block_m": 8, name: value}
    for function in (router.fused_router, router.prepare_fused_router):
        with pytest.raises(TypeError, match=message):
            function(call["logits"], call["bias"], **settings)
    if name == "block_m":
        with pytest.raises(TypeError, match=message):
            router.route_plan(torch.zeros((TOKENS, 8), dtype=torch.int32), 384, value)


def test_a_program_can_be_named_on_a_gpu_alone(call):
    with pytest.raises(ValueError, match=r"program: expected None for CPU tensors"):
        router.prepare_fused_router(call["logits"], call["bias"], top_k=8, block_m=8, program="fused_router.few32")


@pytest.mark.parametrize(
    ("local", "count", "message"),
    [
        (range(0), None, r"local_experts: expected a non-empty range within 0..383"),
        (range(380, 390), None, r"local_experts: expected a non-empty range within 0..383"),
        (range(-1, 4), None, r"local_experts: expected a non-empty range"),
        (range(4), 5, r"num_local_experts: expected 4"),
        (None, 5, r"num_local_experts: expected 384"),
        (torch.zeros(383, dtype=torch.int32), 1, r"local_experts: expected shape \[384\], got \[383\]"),
        (torch.zeros(384), 1, r"local_experts: expected torch.int32, got torch.float32"),
        (torch.zeros(384, dtype=torch.int32), 0, r"num_local_experts: expected 1 to 384, got 0"),
        (torch.full((384,), -1, dtype=torch.int32), None, r"num_local_experts .* expected 1 to 384, got 0"),
        (torch.zeros(768, dtype=torch.int32)[::2], 1, r"local_experts: .* strides \(2,\)"),
    ],
)
def test_bad_local_experts(call, local, count, message):
    with pytest.raises(ValueError, match=message):
        router.fused_router(
            call["logits"], call["bias"], top_k=8, block_m=8, local_experts=local, num_local_experts=count
        )


@pytest.mark.parametrize(
    ("ids", "experts", "block_m", "message"),
    [
        (torch.zeros(4, 8, dtype=torch.int64), 48, 8, r"topk_ids: expected torch.int32, got torch.int64"),
        (torch.zeros(4, dtype=torch.int32), 48, 8, r"topk_ids: expected shape \[any, any\]"),
        (torch.zeros(8, 8, dtype=torch.int32)[:, ::2], 48, 8, r"topk_ids: .* strides \(8, 2\)"),
        (torch.zeros(4, 0, dtype=torch.int32), 48, 8, r"top_k \(columns of topk_ids\): expected at least 1, got 0"),
        (torch.zeros(4, 8, dtype=torch.int32), 0, 8, r"num_experts: expected 1 to 1024, got 0"),
        (torch.zeros(4, 8, dtype=torch.int32), 1025, 8, r"num_experts: expected 1 to 1024, got 1025"),
        (torch.zeros(4, 8, dtype=torch.int32), 48, 4, r"block_m: expected 8 to 256, got 4"),
    ],
)
def test_bad_route_plan_arguments(ids, experts, block_m, message):
    with pytest.raises(ValueError, match=message):
        router.route_plan(ids, experts, block_m)


def test_overlapping_buffers(call):
    plan = call["plan"]
    room = torch.empty(2000, dtype=torch.int32)
    shared = plan._replace(expert_counts=room[:384], expert_scatter_offsets=room[380:764])
    with pytest.raises(ValueError, match=r"plan.expert_counts and plan.expert_scatter_offsets: .* overlap"):
        router.fused_router(call["logits"], call["bias"], top_k=8, block_m=8, plan=shared)
    over_input = plan._replace(expert_counts=call["bias"].view(torch.int32))
    with pytest.raises(ValueError, match=r"overlap"):
        router.fused_router(call["logits"], call["bias"], top_k=8, block_m=8, plan=over_input)


def test_overlap_is_found_behind_a_longer_input():
    base = torch.zeros(64, dtype=torch.int32)
    check_memory({"a": base, "b": base[4:8]}, {})
    with pytest.raises(ValueError, match=r"a and c: expected separate buffers"):
        check_memory({"a": base, "b": base[4:8]}, {"c": base[32:36]})


def test_r19_strided_logits_are_refused_not_copied(call):
    wide = torch.randn(TOKENS, 768)
    for logits in (wide[:, :384], torch.randn(384, TOKENS).t(), wide[:, ::2], torch.randn(1, 384).expand(TOKENS, 384)):
        for function in (router.fused_router, router.prepare_fused_router):
            with pytest.raises(ValueError, match=r"logits: expected a contiguous tensor, got strides \("):
                function(logits, call["bias"], top_k=8, block_m=8)


def test_r05_all_arguments_and_their_devices_are_named(call):
    plan = call["plan"]._replace(expert_counts=call["plan"].expert_counts.to("meta"))
    with pytest.raises(ValueError, match=r"logits on cpu, bias on cpu, .*plan.expert_counts on meta"):
        router.prepare_fused_router(call["logits"], call["bias"], top_k=8, block_m=8, plan=plan)
