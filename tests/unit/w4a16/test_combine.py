"""The down projection with its sums on a CPU: against the reference, wrong arguments and plans, opcheck, compile."""

import pytest
import torch

import chord
from chord.checks.w4a16 import plan_of
from chord.checks.w4a16_combine import combine_case, expected_of
from chord.w4a16 import reference
from chord.w4a16.layout import WeightShape

SHAPE = WeightShape(6, 128, 64)
CPU = torch.device("cpu")


def call(case, function=chord.moe_w4a16_combine, **more):
    gemm = case.gemm
    return function(
        gemm.x,
        gemm.packed,
        gemm.plan,
        case.topk_weights,
        case.topk_ids,
        block_m=gemm.block_m,
        **{"num_experts": case.num_experts, "local_experts": case.expert_map, **more},
    )


@pytest.fixture
def case():
    return combine_case(SHAPE, 9, 4, 8, "remote", CPU)


@pytest.mark.parametrize("routing", ["random", "remote", "one"])
def test_sums_are_as_exact_as_the_reference_and_zero_without_an_expert(routing):
    case = combine_case(SHAPE, 12, 3, 8, routing, CPU)
    out, expected = call(case), expected_of(case)
    assert reference.rms_error(out, expected.exact) <= 1.1 * expected.error + 1e-9
    nobody = (case.gemm.expert_of.view(12, 3) < 0).all(dim=1)
    assert not out[nobody].any()


def test_a_range_and_a_map_of_local_experts_mean_the_same(case):
    local = range(3, 9)
    assert torch.equal(call(case), call(case, local_experts=local))
    with pytest.raises(ValueError, match=r"num_experts: expected how many experts topk_ids name"):
        call(case, local_experts=local, num_experts=None)
    with pytest.raises(ValueError, match=r"local_experts: expected 6, the experts of packed, got range\(3, 8\)"):
        call(case, local_experts=range(3, 8))
    with pytest.raises(ValueError, match="expected which of 12 experts the 6 of packed are, got None"):
        call(case, local_experts=None)


def test_without_a_map_ids_name_the_experts_of_packed(case):
    ids = case.gemm.expert_of.view(9, 4).to(torch.int32)
    got = call(case._replace(topk_ids=ids), num_experts=None, local_experts=None, validate=False)
    assert torch.equal(got, call(case))


def test_outputs_that_are_given_are_used(case):
    routed, out = torch.empty(36, 128, dtype=torch.bfloat16), torch.empty(9, 128, dtype=torch.bfloat16)
    assert call(case, routed=routed, out=out) is out
    assert torch.equal(out, call(case))
    x = case.gemm.x.clone()
    over = x.flatten()[: 9 * 128].view(9, 128)  # of x, as a framework reuses its buffers
    assert torch.equal(call(case._replace(gemm=case.gemm._replace(x=x)), out=over), out)
    prepared = call(case, chord.prepare_moe_w4a16_combine, out=torch.zeros_like(out))
    prepared()
    assert prepared.program == "reference"
    assert torch.equal(prepared.out, out)
    with pytest.raises(ValueError, match="program: expected None for CPU tensors"):
        call(case, chord.prepare_moe_w4a16_combine, program="moe_w4a16.wgmma_r32")


def test_no_tokens():
    case = combine_case(SHAPE, 0, 4, 8, "random", CPU)
    assert call(case).shape == (0, 128)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"routed": torch.empty(35, 128, dtype=torch.bfloat16)}, ValueError, r"routed: expected shape \[36, 128\]"),
        (
            {"out": torch.empty(9, 64, dtype=torch.bfloat16)},
            ValueError,
            r"out: expected shape \[9, 128\], got \[9, 64\]",
        ),
        ({"out": torch.empty(9, 128)}, ValueError, r"out: expected torch\.bfloat16, got torch\.float32"),
        ({"num_experts": 11}, ValueError, r"local_experts: expected shape \[11\], got \[12\]"),
        (
            {"num_experts": 1 << 40, "local_experts": range(3, 9)},
            ValueError,
            r"num_experts: expected 1 to 1024, got 1099511627776",
        ),
        ({"num_experts": True}, TypeError, "num_experts: expected an int, got True"),
        ({"expected_rows": -1}, ValueError, "expected_rows: expected at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(case, change, error, message):
    with pytest.raises(error, match=message):
        call(case, **change)


def test_wrong_tensors_are_refused(case):
    with pytest.raises(ValueError, match=r"topk_weights: expected shape \[9, 4\], got \[9, 3\]"):
        call(case._replace(topk_weights=torch.rand(9, 3)))
    with pytest.raises(ValueError, match=r"x: expected shape \[36, 64\], got \[35, 64\]"):
        call(case._replace(gemm=case.gemm._replace(x=case.gemm.x[:35])))
    with pytest.raises(ValueError, match=r"topk_ids: expected torch\.int32, got torch\.int64"):
        call(case._replace(topk_ids=case.topk_ids.long()))
    gated = combine_case(WeightShape(6, 128, 64, gated=True), 9, 4, 8, "random", CPU)
    with pytest.raises(ValueError, match="packed: expected a projection packed without gates"):
        call(gated)
    scratch = torch.empty(36, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="overlap"):
        call(case, routed=scratch, out=scratch[:9])
    weights = case.gemm.packed.data.view(-1)[: 9 * 128 * 2].view(torch.bfloat16).view(9, 128)
    with pytest.raises(ValueError, match="out and packed: expected separate buffers"):
        call(case, out=weights)  # the next call would find other weights


def test_validate_finds_a_plan_of_other_ids(case):
    plan = plan_of(case.gemm.expert_of, SHAPE.experts, 8, CPU, strange=False)
    case = case._replace(gemm=case.gemm._replace(plan=plan))
    assert torch.equal(call(case, validate=True), call(case))
    pair = int((case.gemm.expert_of >= 0).nonzero()[0])
    ids = case.topk_ids.clone()
    ids.view(-1)[pair] = -1
    expert = int(case.gemm.expert_of[pair])
    with pytest.raises(
        ValueError, match=f"plan: expected no expert for pair {pair}, as topk_ids say, got expert {expert}"
    ):
        call(case._replace(topk_ids=ids), validate=True)
    ids.view(-1)[pair] = 3 + (expert + 1) % SHAPE.experts
    with pytest.raises(ValueError, match=f"plan: expected expert {(expert + 1) % 6} for pair {pair}"):
        call(case._replace(topk_ids=ids), validate=True)


def test_opcheck_and_compile(case):
    gemm = case.gemm
    given = (
        gemm.x, gemm.packed.data, *gemm.plan, case.topk_weights, case.topk_ids, case.expert_map, case.num_experts, 8, 1,
        False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.chord.moe_w4a16_combine.default, given)
    routed, out = torch.zeros(36, 128, dtype=torch.bfloat16), torch.zeros(9, 128, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.chord.moe_w4a16_combine_out.default, (*given, routed, out))
    torch.compiler.reset()
    compiled = torch.compile(lambda: call(case), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), call(case))
