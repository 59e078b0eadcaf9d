"""R05, R12 to R15, R17 to R20, R22: what operators do with their arguments, over the list in operators.py.

On a CPU the plain reference runs, on a GPU (marked) the kernels. What is particular to one operator (ties, plan
buffers, arms) is tried beside that operator.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="the operators need torch")

from cases.operators import (  # noqa: E402
    CASES,
    FIRST_CASES,
    FIRST_IDS,
    IDS,
    MASKED_CASES,
    MASKED_IDS,
    OP_CASES,
    OP_IDS,
    PREPARED_CASES,
    PREPARED_IDS,
    ROW_CASES,
    ROW_IDS,
    TOKEN_CASES,
    TOKEN_IDS,
    moved,
    same_bits,
    tensors_of,
    with_tensor,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import chord  # noqa: E402
from chord import _paths  # noqa: E402
from chord.w4a16.layout import WeightShape  # noqa: E402

META = torch.device("meta")


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("tokens", [1, 17, 64])
def test_every_case_is_right(case, tokens, device):
    """What the other tests vary gives right results as it is."""
    given = case.make(tokens, device)
    assert case.problems(given, case.call(**given)) == []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_r05_devices_that_differ_are_named(case, device):
    """Each tensor in turn elsewhere: ValueError with the argument's name and both devices, before anything runs."""
    given = case.make(4, device)
    tensors = tensors_of(given)
    elsewhere = META if device.type == "cpu" else torch.device("cpu")
    calls = [case.call, *([case.prepare] if case.prepare else [])]
    for name, tensor in tensors.items() if len(tensors) > 1 else ():
        for call in calls:
            with pytest.raises(ValueError, match=f"on {elsewhere.type}") as caught:
                call(**with_tensor(given, name, tensor.to(elsewhere)))
            said = str(caught.value)
            assert f"{name} on {elsewhere.type}" in said or "packed" in said, said
            assert f"on {device}" in said, said


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_r05_a_device_that_is_not_the_current_one(case):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    with torch.cuda.device(first):
        given = case.make(17, second)
        side = torch.cuda.Stream(second)
        side.wait_stream(torch.cuda.current_stream(second))
        with torch.cuda.stream(side):
            result = case.call(**given)
        assert torch.cuda.current_device() == 0
        assert case.problems(given, result) == []


@pytest.mark.parametrize("case", ROW_CASES, ids=ROW_IDS)
@pytest.mark.parametrize("company", ["random", "1e30", "nan"])
def test_r12_a_row_does_not_depend_on_its_company(case, company, device):
    """One token alone and among others, in one arm: the same bits.

    Where counts change the arm, an operator's own tests say what may change. `invariant` cases and the reference are
    one arm throughout, and the W4A16 arms that are routed on one architecture give the same bits (docs/w4a16.md).
    """
    one_arm = device.type == "cpu" or case.operator.startswith("moe_w4a16")
    for tokens in (7, 64, 300, 1024) if one_arm else (7,):
        given = case.make(tokens, device)
        name, rows = next(iter(tensors_of(given).items()))
        kept = tokens // 2
        if company != "random":
            others, strangers = rows.clone(), torch.arange(tokens, device=device) != kept
            if rows.dim() == 3:  # slabs of rows
                others[:, strangers] = float(company)
            else:  # one for a token, or one for each of its routes
                others[strangers.repeat_interleave(rows.shape[0] // tokens)] = float(company)
            given = with_tensor(given, name, others)
        among = case.row(case.call(**given), kept)
        alone = case.row(case.call(**case.alone(given, kept)), 0)
        assert same_bits(among, alone), tokens


def test_r13_scale_is_applied_once_and_the_bias_selects_alone(device):
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(33, 896, generator=generator), torch.randn(896, generator=generator) * 0.05
    logits[:, 5], bias[5] = -20.0, 100.0
    logits, bias = logits.to(device), bias.to(device)
    scores = logits.double().sigmoid()
    for renormalize in (True, False):
        for scale in (1.0, 2.5):
            out = chord.fused_router(
                logits, bias, top_k=16, block_m=8, renormalize=renormalize, routed_scaling_factor=scale
            )
            ids = out.topk_ids.long()
            assert (ids == 5).any(1).all(), "expert 5 is selected by its bias"
            want = scores.gather(1, ids)
            want = scale * (want / want.sum(1, keepdim=True) if renormalize else want)
            assert torch.allclose(out.topk_weights.double(), want, rtol=1e-5, atol=1e-9)


def test_r13_weights_folded_in_equal_weights_outside(device):
    """E = 8, top 4, M = 33, within one bfloat16 rounding a row; and absent weights are legal."""
    case = next(case for case in CASES if (case.operator, case.name) == ("moe_w4a16", "gate_up"))
    given = case.make(33, device)
    weight = torch.rand(33 * 4, generator=torch.Generator().manual_seed(5)).to(device)
    plain = chord.moe_w4a16(**given)
    assert case.problems(given, plain) == []
    folded = chord.moe_w4a16(**given, row_weight=weight)
    outside = plain.float() * weight[:, None]
    assert torch.all((folded.float() - outside).abs() <= 2.0**-7 * outside.abs() + 1e-30)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=TOKEN_IDS)
def test_r14_no_tokens(case, device):
    given = case.make(0, device)
    result = case.call(**given)
    outputs = case.outputs(given, result)
    assert tuple(tuple(out.shape) for out in outputs) == case.empty
    for out in outputs:
        assert not out.any(), "padded length, counts and offsets are written as 0"
    if case.prepare:
        case.prepare(**given)()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case.call(**given)
        graph.replay()
        assert (torch.ones(5, device=device) * 2).sum().item() == 10
        torch.cuda.synchronize()
        assert tuple(tuple(out.shape) for out in case.outputs(given, captured)) == case.empty


def test_r14_the_padded_length_is_not_left_over(device):
    ids = torch.empty(0, 8, dtype=torch.int32, device=device)
    plan = chord.allocate_route_plan(4, top_k=8, num_experts=48, block_m=8, device=device)
    for tensor in plan:
        tensor.fill_(7)
    chord.route_plan(ids, 48, 8, plan=plan)
    assert plan.num_tokens_post_padded.tolist() == [0]
    x = torch.empty(0, 128, dtype=torch.bfloat16, device=device)
    given = next(case for case in CASES if case.name == "gate_up").make(3, device)
    assert chord.moe_w4a16(x, given["packed"], plan, top_k=8, block_m=8).shape == (0, 256)


def test_r15_experts_that_live_elsewhere(device):
    """60 % of the ids -1, one row all -1, then all of them, then 48 and -2: no NaN of the output survives."""
    from chord.checks.inputs import expert_parallel_ids
    from chord.checks.w4a16 import checkpoint

    shape = WeightShape(48, 128, 128)
    words, scales = checkpoint(shape, torch.device("cpu"))
    packed = chord.pack_w4a16(words, scales).to(device)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    ids = expert_parallel_ids(64, 8, 48, device)
    strange = ids.clone()
    strange[ids < 0] = torch.where(torch.arange(int((ids < 0).sum())) % 2 == 0, 48, -2).to(device, torch.int32)
    none = torch.full_like(ids, -1)
    results = []
    for chosen in (ids, strange, none):
        plan = chord.route_plan(chosen, 48, 8)
        real = (chosen >= 0) & (chosen < 48)
        assert int(plan.expert_counts.sum()) == int(real.sum())
        out = torch.full((512, 128), float("nan"), dtype=torch.bfloat16, device=device)
        chord.moe_w4a16(x, packed, plan, top_k=8, block_m=8, zero_missing=True, out=out)
        assert not out.isnan().any()
        assert not out[~real.flatten()].any(), "an entry that lives elsewhere contributes zero"
        results.append(out)
    assert same_bits([results[0]], [results[1]]), "ids outside count nowhere, as -1 does"
    for token in range(1, 64, 9):  # the bits without the -1 entries
        pairs = (ids[token] >= 0).nonzero().flatten()
        alone = chord.route_plan(ids[token, pairs][:, None].contiguous(), 48, 8)
        repeated = x[token : token + 1].expand(len(pairs), -1).contiguous()
        got = chord.moe_w4a16(repeated, packed, alone, top_k=1, block_m=8)
        assert same_bits([got], [results[0].view(64, 8, 128)[token, pairs]])


PLANNED_CASES = [case for case in CASES if "plan" in case.make(1, torch.device("cpu"))]


@pytest.mark.parametrize("case", PLANNED_CASES, ids=[f"{case.operator}-{case.name}" for case in PLANNED_CASES])
def test_r16_what_lies_behind_a_plans_length_is_not_read(case, device):
    given = case.make(17, device)
    plan = given["plan"]
    junk = torch.full((4096,), 2**31 - 1, dtype=torch.int32, device=device)
    extent, block_m = int(plan.num_tokens_post_padded), given["block_m"]
    roomy = plan._replace(
        sorted_token_ids=torch.cat([plan.sorted_token_ids[:extent], junk]),
        expert_ids=torch.cat([plan.expert_ids[: extent // block_m], junk[: len(junk) // block_m]]),
    )
    wanted, found = case.call(**given), case.call(**given | {"plan": roomy})
    assert case.problems(given, found) == []
    assert same_bits(case.outputs(given, wanted), case.outputs(given, found))


@pytest.mark.parametrize("group", [0, 16, 64, 128, -1])
def test_r17_other_group_sizes_are_refused_when_packed(group, device):
    n, k = 128, 256
    codes = torch.zeros(2, n, k // 8, dtype=torch.int32, device=device)
    groups = {0: 0, -1: 1}.get(group, k // max(group, 1))
    scales = torch.ones(2, n, groups, dtype=torch.bfloat16, device=device)
    with pytest.raises(
        ValueError, match=r"one scale for 32 k.*got .* other group sizes are not served|k: expected .* got"
    ):
        chord.pack_w4a16(codes, scales)


@pytest.mark.parametrize(
    ("n", "k", "extra", "said"),
    [
        (64, 7168, 0, ""), (64, 1344, 0, ""), (4096, 64, 0, ""), (1344, 64, 0, ""),
        (64, 7184, 0, "one scale for 32 k"), (64, 1000, 0, "one scale for 32 k"),
        (64, 7200, 0, "k: expected .* got 7200"),
        (4095, 64, 0, "n: expected .* got 4095"), (0, 64, 0, "n: expected .* got 0"),
        (64, 256, 1, "got .* codes with 9 scales a row"),
    ],
)  # fmt: skip
def test_r17_shapes_are_right_or_refused_when_packed(n, k, extra, said, device):
    from chord.checks.inputs import expert_parallel_ids
    from chord.w4a16 import reference

    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(-(2**31), 2**31, (2, n, k // 8), generator=generator).to(torch.int32).to(device)
    scales = (torch.rand(2, n, k // 32 + extra, generator=generator) * 0.04 + 0.005).to(torch.bfloat16).to(device)
    if said:
        with pytest.raises(ValueError, match=said):
            chord.pack_w4a16(codes, scales)
        return
    packed = chord.pack_w4a16(codes, scales)
    assert all(torch.equal(a, b) for a, b in zip(chord.unpack_w4a16(packed), (codes, scales), strict=True))
    ids = expert_parallel_ids(5, 1, 2, torch.device("cpu"), absent=0.0).to(device).abs()
    x = torch.randn(5, k, generator=generator).to(torch.bfloat16).to(device)
    got = chord.moe_w4a16(x, packed, chord.route_plan(ids, 2, 8), top_k=1, block_m=8)
    rows = {e: (ids.flatten().cpu() == e).nonzero().flatten() for e in range(2)}
    call = (x.cpu(), codes.cpu(), scales.cpu(), rows)
    exact = reference.moe_w4a16(*call, top_k=1, row_weight=None, exact=True)
    plain = reference.rms_error(reference.moe_w4a16(*call, top_k=1, row_weight=None), exact)
    assert reference.rms_error(got.cpu(), exact) <= 1.1 * plain


def strided_forms(tensor):
    """The same values in other memory: rows apart, transposed, every second element, and rows that are all one."""
    rows, *rest = tensor.shape
    wide = torch.zeros(rows, *rest[:-1], 2 * rest[-1], dtype=tensor.dtype, device=tensor.device) if rest else None
    if wide is not None:
        wide[..., : rest[-1]] = tensor
        yield "rows apart", wide[..., : rest[-1]]
        yield "transposed", tensor.transpose(-1, 0).contiguous().transpose(-1, 0)
        yield "expanded", tensor[:1].expand(tensor.shape)
    spread = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    spread[..., ::2] = tensor
    yield "every second", spread[..., ::2]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_r19_strided_tensors_give_the_same_bits_or_are_named(case, device):
    given = case.make(6, device)
    for name, tensor in tensors_of(given).items():
        for form, strided in strided_forms(tensor) if tensor.numel() > 1 else ():
            if strided.is_contiguous():
                continue
            plain = with_tensor(given, name, strided.contiguous())
            for call in (case.call, *([case.prepare] if case.prepare else [])):
                try:
                    result = call(**with_tensor(given, name, strided))
                except ValueError as error:
                    said = str(error)
                    assert re.search(rf"(^|\b|\.)({name}|packed|data)\b.*contiguous.*strides", said), (form, said)
                    assert str(strided.stride()[0]) in said or str(list(strided.stride())) in said, (form, said)
                else:
                    assert call is case.call, "a prepared launch makes no hidden copy"
                    assert same_bits(case.outputs(given, result), case.outputs(given, case.call(**plain))), (name, form)


@pytest.mark.parametrize("case", [c for c in PREPARED_CASES if "w4a16" in c.operator], ids=lambda case: case.name)
def test_r19_bytes_between_strided_output_rows_keep_their_content(case, device):
    given = case.make(6, device)
    shape = case.call(**given).shape
    wide = torch.full((*shape[:-1], 2 * shape[-1]), 7.0, dtype=torch.bfloat16, device=device)
    innermost = torch.full(tuple(reversed(shape)), 7.0, dtype=torch.bfloat16, device=device).permute(
        *reversed(range(len(shape)))
    )
    for out in (wide[..., : shape[-1]], innermost):
        for call in (case.call, case.prepare):
            with pytest.raises(ValueError, match=r"out: expected a contiguous tensor, got strides"):
                call(**given, out=out)
    assert bool((wide == 7.0).all())
    assert bool((innermost == 7.0).all())


@pytest.mark.parametrize("case", MASKED_CASES, ids=MASKED_IDS)
def test_r18_experts_without_rows(case, device):
    """Rows past a count are NaN on the way in and keep their bits on the way out; a bad count writes no other slab."""
    given = case.make(64, device)
    experts, room = given["x"].shape[:2]
    shape = case.call(**given).shape
    for wanted in ((0, 5, 0, 64), (0, 0, 0, 0)):
        counts = torch.tensor((wanted * experts)[:experts], dtype=torch.int32, device=device)
        beyond = torch.arange(room, device=device) >= counts[:, None]
        x = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
        x[beyond] = float("nan")
        call = given | {"x": x, "counts": counts}
        out = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device)
        case.call(**call, out=out)
        assert case.problems(call, out) == []
        assert bool((out[beyond] == 7.0).all())
        assert not out.isnan().any()
    for bad in (65, -1):
        counts = torch.tensor(([0, bad, 0, 3] * experts)[:experts], dtype=torch.int32, device=device)
        x = torch.randn(given["x"].shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
        out = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device)
        case.call(**given | {"x": x, "counts": counts}, out=out)
        assert bool((out[0] == 7.0).all())
        assert bool((out[2] == 7.0).all())
        assert bool((out[3, 3:] == 7.0).all())
        with pytest.raises(ValueError, match=rf"counts: expected .* got {bad}"):
            case.call(**given | {"x": x, "counts": counts}, validate=True)


FIRST_USE = """
import sys, threading
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from cases.operators import CASES, same_bits
from chord import _runtime
from chord.errors import CaptureError
case = CASES[{position}]
device = torch.device("cuda", 0)
given = case.make(17, device)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        result = case.call(**given)
except CaptureError as error:
    assert "preload" in str(error), error
    for operator in (case.operator, *case.others):
        _runtime.registry().preload(operator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.call(**given)
except (RuntimeError, ValueError) as error:
    assert "captur" in str(error), error
    print("refused")
    sys.exit()
for _ in range(100):
    graph.replay()
torch.cuda.synchronize()
print(case.problems(given, result))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", FIRST_CASES, ids=FIRST_IDS)
def test_r20_first_use_inside_a_capture(case):
    code = FIRST_USE.format(
        paths=[str(_paths.PACKAGE.parent), str(_paths.PACKAGE.parent / "tests")], position=CASES.index(case)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


class Recorder(TorchDispatchMode):
    """Notes which of our ops a call reaches, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "chord":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def ops_of(case, tokens, device):
    """The ops that a case's public call reaches: with results of its own and with a caller's buffers."""
    given = case.make(tokens, device)
    if case.operator in ("moe_w4a16_contiguous", "moe_w4a16_masked"):
        given["zero_missing"] = True  # rows of nobody hold whatever memory held, which no two runs agree on
    recorder = Recorder()
    with recorder:
        result = case.call(**given)
        if case.operator.startswith("moe_w4a16"):
            case.call(**given, out=result)
        elif case.operator in ("fused_router", "route_plan"):
            case.call(**given, plan=result if case.operator == "route_plan" else result.plan)
    return recorder.calls


def test_r22_every_torch_op_is_among_the_cases():
    reached = {call[0].name().partition("::")[2] for case in CASES for call in ops_of(case, 3, torch.device("cpu"))}
    registered = {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("chord::")}
    assert reached == registered


@pytest.mark.parametrize("case", OP_CASES, ids=OP_IDS)
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_r22_opcheck(case, tokens, device):
    calls = ops_of(case, tokens, device)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled, so that what an op leaves alone compares equal
    try:
        for function, arguments in calls:
            torch.library.opcheck(function, arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", OP_CASES, ids=OP_IDS)
def test_r22_compiled_to_one_graph_equals_eager(case, device):
    torch.compiler.reset()
    compiled = torch.compile(lambda **given: case.call(**given), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (17, 33, 1, 0):
        given = case.make(tokens, device)
        got, want = case.outputs(given, compiled(**given)), case.outputs(given, case.call(**given))
        assert same_bits(got, want), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREPARED_CASES, ids=PREPARED_IDS)
def test_r21_a_prepared_launch_costs_little_and_follows_the_stream(case):
    from chord.bench.host import launch_times

    device = torch.device("cuda", torch.cuda.current_device())
    prepared = case.prepare(**case.make(1, device))
    prepared()
    times = launch_times(prepared, launches=4000)
    assert times.prepared_us - times.bare_us <= 1.0, f"{times.prepared_us:.2f} and {times.bare_us:.2f} us"
    side = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        prepared()
        done = torch.cuda.Event()
        done.record(side)
    assert not done.query(), "it waits behind the sleep on its own stream, and has returned"
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_reference_and_the_kernels_agree_on_moved_arguments(case, device):
    """Arguments that were made elsewhere and moved are the same call."""
    given = case.make(5, torch.device("cpu"))
    assert case.problems(given, case.call(**moved(given, device))) == []
