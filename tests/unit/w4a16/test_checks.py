"""The checks themselves, with the plain reference in a kernel's place: it passes, and each kind of fault is found."""

import pytest
import torch

from chord.checks import qualify_w4a16, w4a16, w4a16_grouped
from chord.w4a16 import grouped_ops, ops
from chord.w4a16.layout import WeightShape

CPU = torch.device("cpu")


def reference_program(case, program, out, plan=None):
    scalars = (case.packed.shape, case.top_k, case.block_m, 0, False, False, case.swiglu)
    ops.run(case.x, case.packed.data, *(plan or case.plan), case.row_weight, out, *scalars)


@pytest.fixture
def program(monkeypatch):
    """Sets what runs instead of a kernel, after the reference has written its result."""

    def use(fault=lambda out, case: None):
        def run(case, program, out, plan=None):
            reference_program(case, program, out, plan)
            fault(out, case)

        monkeypatch.setattr(w4a16, "run_program", run)

    use()
    return use


def problems(routing="remote", seed=0):
    case = w4a16.gemm_case(WeightShape(5, 320, 64, gated=True), 12, 2, 8, routing, CPU, weighted=True, seed=seed)
    return list(w4a16.gemm_problems(case, w4a16.Expected.of(w4a16.placed(case, CPU)), "p"))


@pytest.mark.parametrize("routing", w4a16.ROUTINGS)
def test_the_reference_passes(program, routing):
    assert problems(routing) == []


def test_faults_are_found(program):
    program(lambda out, case: out[(case.expert_of < 0).nonzero()[0, 0]].zero_())
    assert problems() == ["p: wrote rows that are nobody's"]
    program(lambda out, case: out[case.expert_of >= 0].numel() and out.mul_(1.02))
    assert any("RMS error" in problem for problem in problems())
    program(lambda out, case: out.as_strided((1,), (1,), 0).fill_(1.0))
    assert problems() == ["p: wrote outside the output"]
    program(lambda out, case: out.copy_(torch.where(torch.rand_like(out) < 0.5, out * 1.01, out)))
    assert "p: two runs differ" in problems()


def test_every_program_meets_every_case(program):
    names = ["moe_w4a16.mma_r32", "moe_w4a16.wgmma_r32"]
    found = qualify_w4a16._gemm_problems(names, qualify_w4a16.TINY_LOADS, CPU, tiny=True)
    cases = len(qualify_w4a16.TINY_LOADS) * len(qualify_w4a16.TINY_ROUTINGS)
    assert {name: len(outcomes) for name, outcomes in found.items()} == dict.fromkeys(names, cases)
    assert not any(problem for outcomes in found.values() for case in outcomes for problem in case)
    assert qualify_w4a16._gemm_problems([], qualify_w4a16.LOADS, CPU, tiny=False) == {}


@pytest.fixture
def grouped_program(monkeypatch):
    """The same for the grouped operators."""

    def use(fault=lambda out, case: None):
        def run(case, program, out):
            shape = case.packed.shape
            rows = out.view(*case.x.shape[:-1], -1)
            grouped_ops.run(case.x, case.packed.data, case.rows, rows, shape, case.settings)
            fault(out, case)

        monkeypatch.setattr(w4a16_grouped, "run_program", run)

    use()
    return use


@pytest.mark.parametrize("form", w4a16_grouped.FORMS)
def test_every_grouped_program_meets_every_case(grouped_program, form):
    operator = w4a16_grouped.FORMS[form]
    name = f"{operator}.mma_r32"
    found = qualify_w4a16._grouped_problems(operator, [name], qualify_w4a16.TINY_SLABS, CPU, tiny=True)
    forms = sum(taker == operator for taker in w4a16_grouped.FORMS.values())
    assert len(found[name]) == len(qualify_w4a16.TINY_SLABS) * len(qualify_w4a16.TINY_SPREADS) * forms
    assert not any(problem for case in found[name] for problem in case)


@pytest.mark.parametrize("form", w4a16_grouped.FORMS)
def test_rows_of_nobody_that_are_written_are_found(grouped_program, form):
    shape = WeightShape(5, 128, 64, gated=True)
    for spread in w4a16_grouped.SPREADS:
        counts = w4a16_grouped.draw_counts(spread, 4, 5)
        assert len(counts) == 5
        case = w4a16_grouped.grouped_case(shape, form, counts, CPU, swiglu=spread == "hot")
        expected = w4a16_grouped.expected_of(w4a16_grouped.placed(case, CPU))
        grouped_program()
        assert list(w4a16_grouped.grouped_problems(case, expected, "p")) == []
        grouped_program(lambda out, case: out[(case.expert_of < 0).nonzero()[-1, 0]].zero_())
        assert list(w4a16_grouped.grouped_problems(case, expected, "p")) == ["p: wrote rows that are nobody's"]


def test_packers_are_compared_with_torchs_packing():
    passed = qualify_w4a16._packer_problems(["pack"], ["unpack"], CPU)
    assert not any(problem for outcomes in passed.values() for case in outcomes for problem in case)
    assert {name: len(outcomes) for name, outcomes in passed.items()} == {"pack": 6, "unpack": 6}
    assert qualify_w4a16._differs("x", torch.zeros(2), torch.ones(2)) == ["x: bytes differ"]


def test_loads_are_legal_and_name_programs():
    for load in (*qualify_w4a16.LOADS, *qualify_w4a16.TINY_LOADS):
        assert load.block_m % 8 == 0
    assert {"moe_w4a16.wgmma_r32", "moe_w4a16.mma_r32"} <= set(qualify_w4a16._programs("moe_w4a16", "sm_90a", "*"))
    assert qualify_w4a16._programs("moe_w4a16", "sm_90a", "*mma_r48") == ["moe_w4a16.mma_r48"]
    assert len(qualify_w4a16._programs("w4a16_pack", "sm_90a", "*pack*")) == 1
