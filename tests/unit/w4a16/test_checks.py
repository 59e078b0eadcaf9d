"""The checks themselves, with the plain reference in a kernel's place: it passes, and each kind of fault is found."""

import pytest
import torch

from chord.checks import qualify_w4a16, w4a16, w4a16_combine, w4a16_grouped
from chord.w4a16 import grouped_ops, ops
from chord.w4a16 import reference as w4a16_reference
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


@pytest.fixture
def sums(monkeypatch):
    """Sets what spoils the sums behind a GEMM, for which the reference stands in; the two operators stay right."""
    prepare = w4a16_combine.prepare_moe_w4a16_combine

    def use(fault):
        def prepared(*given, program, out, **options):
            made = prepare(*given, out=out, **options)
            return lambda: (made(), fault(out))

        monkeypatch.setattr(w4a16_combine, "prepare_moe_w4a16_combine", prepared)

    monkeypatch.setattr(w4a16_combine, "run_program", reference_program)
    return use


SUM_FAULTS = {
    "two runs differ": lambda out: out.copy_(torch.where(torch.rand_like(out) < 0.5, out * 1.01, out)),
    "wrote outside the output": lambda out: out.as_strided((1,), (1,), 0).fill_(1.0),
    "other bits than moe_w4a16 and moe_combine": lambda out: out.view(torch.int16)[0, 0].add_(1),
    "a token without an expert here is not zero": lambda out: out.masked_fill_(
        (out == 0).all(dim=1, keepdim=True), 2.0
    ),
    "RMS error": lambda out: out.mul_(1.05),
}


@pytest.mark.parametrize("routing", ["random", "one", "remote"])
def test_right_sums_pass(sums, routing):
    sums(lambda out: None)
    case = w4a16_combine.combine_case(WeightShape(5, 704, 64), 9, 3, 8, routing, CPU)
    expected = w4a16_combine.expected_of(case)
    assert list(w4a16_combine.combine_problems(case, expected, "p")) == []


@pytest.mark.parametrize("what", SUM_FAULTS)
def test_faults_of_sums_are_found(sums, what):
    sums(SUM_FAULTS[what])
    case = w4a16_combine.combine_case(WeightShape(5, 704, 64), 9, 3, 8, "one", CPU)
    expected = w4a16_combine.expected_of(case)
    problems = list(w4a16_combine.combine_problems(case, expected, "p"))
    assert any(problem.startswith(f"p: {what}") for problem in problems), problems


def test_rows_are_sorted_by_expert():
    owners = torch.tensor([3, -1, 0, 3, 0, -1, 7])
    found = {expert: rows.tolist() for expert, rows in w4a16_reference.rows_by_expert(owners).items()}
    assert found == {0: [2, 4], 3: [0, 3], 7: [6]}
    assert w4a16_reference.rows_by_expert(owners[:0]) == {}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("limit", [1, 3 * 128 * 64, 1 << 30])
def test_weights_of_several_experts_at_once_are_those_of_each(exact, limit, monkeypatch):
    monkeypatch.setattr(w4a16_reference, "_WEIGHTS_AT_ONCE", limit)
    words, scales = w4a16.checkpoint(WeightShape(8, 128, 64), CPU)
    each = w4a16_reference.exact_weights if exact else w4a16_reference.contract_weights
    chosen = (0, 1, 3, 4, 7)
    found = list(w4a16_reference.expert_weights(words, scales, chosen, exact=exact))
    assert [expert for expert, _ in found] == list(chosen)
    assert all(torch.equal(weight, each(words[expert], scales[expert])) for expert, weight in found)


def test_packers_are_compared_with_torchs_packing():
    passed = qualify_w4a16._packer_problems(["pack"], ["unpack"], CPU)
    assert not any(problem for outcomes in passed.values() for case in outcomes for problem in case)
    assert {name: len(outcomes) for name, outcomes in passed.items()} == dict.fromkeys(
        ("pack", "unpack"), 2 * len(qualify_w4a16.TINY_LOADS)
    )
    assert qualify_w4a16._differs("x", torch.zeros(2), torch.ones(2)) == ["x: bytes differ"]


def test_loads_are_legal_and_name_programs():
    for load in (*qualify_w4a16.LOADS, *qualify_w4a16.TINY_LOADS, qualify_w4a16.TINY_TALL):
        assert load.block_m % 8 == 0
    assert {"moe_w4a16.wgmma_r32", "moe_w4a16.mma_r32"} <= set(qualify_w4a16._programs("moe_w4a16", "sm_90a", "*"))
    assert qualify_w4a16._programs("moe_w4a16", "sm_90a", "*mma_r48") == ["moe_w4a16.mma_r48"]
    assert len(qualify_w4a16._programs("w4a16_pack", "sm_90a", "*pack*")) == 1
