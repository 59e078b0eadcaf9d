"""The reference against brute force: one Python loop per rule of the contract."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chord.checks.inputs import ADVERSARIES, adversarial_case, normal_case
from chord.router import reference

CPU = torch.device("cpu")


def f32(value: float) -> float:
    """Rounds to float32."""
    if math.isinf(value) or math.isnan(value):
        return value
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


def brute_force_row(logits, bias, top_k, renormalize, factor):
    """(weights, ids) of one row, lists of Python floats in and out."""
    scores, ranks = [], []
    for x, b in zip(logits, bias, strict=True):
        if math.isnan(x):
            score = math.nan
        else:
            t = math.exp(-abs(x))
            score = f32((1.0 if x >= 0 else t) / (1.0 + t))
        scores.append(score)
        ranks.append(f32(score + b))

    def before(expert):  # Python's sort is stable: equal ranks stay in id order
        return (1, 0.0) if math.isnan(ranks[expert]) else (0, -ranks[expert])

    ids = sorted(sorted(range(len(logits)), key=before)[:top_k])
    taken = [0.0 if math.isnan(ranks[e]) else scores[e] for e in ids]
    total = 0.0
    for score in taken:
        total = f32(total + score)
    divisor = total if total > 0 else 1.0
    weights = [f32(f32(s / divisor) * factor) if renormalize else f32(s * factor) for s in taken]
    return weights, ids


special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 100.0, -100.0, -104.0, math.inf, -math.inf, math.nan, 3e38, 1e-40])
values = st.one_of(special, st.floats(-8, 8, width=32), st.floats(width=32))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_route_equals_brute_force(data):
    experts = data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, experts))
    rows = data.draw(st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=1, max_size=4))
    bias = data.draw(st.lists(st.one_of(values, st.just(0.0)), min_size=experts, max_size=experts))
    renormalize, factor = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 2.5]))
    weights, ids = reference.route(torch.tensor(rows), torch.tensor(bias), top_k, renormalize, factor)
    for row, logits in enumerate(rows):
        want_weights, want_ids = brute_force_row(logits, bias, top_k, renormalize, factor)
        assert ids[row].tolist() == want_ids
        assert weights[row].tolist() == want_weights


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("experts", [896, 384])
def test_adversarial_rows_equal_brute_force(kind, experts):
    case = adversarial_case(kind, 3, experts, torch.float32, CPU)
    weights, ids = reference.route(case.logits, case.bias, case.top_k, True, 1.0)
    for row in range(3):
        want = brute_force_row(case.logits[row].tolist(), case.bias.tolist(), case.top_k, True, 1.0)
        assert ids[row].tolist() == want[1]
        assert weights[row].tolist() == want[0]


def test_scores_stay_denormal_and_never_overflow():
    x = torch.tensor([-100.0, -103.0, -200.0, 100.0, math.inf, -math.inf, -0.0, 0.0, 3e38, -3e38])
    got = reference.scores(x)
    assert got[0] == f32(math.exp(-100.0)) > 0
    assert got[1] > 0
    assert got[2:].tolist() == [0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
    assert reference.scores(torch.tensor([math.nan])).isnan().all()


def test_keys_are_distinct_and_ordered():
    negative_nan = struct.unpack("<f", struct.pack("<I", 0xFFC00001))[0]
    ranks = torch.tensor([[-0.0, 0.0, math.nan, -math.inf, math.inf, 1e-45, -1e-45, negative_nan, 1.0, -1.0]])
    keys = reference.rank_keys(ranks)[0]
    order = keys.argsort(descending=True).tolist()
    assert order == [4, 8, 5, 0, 1, 6, 9, 3, 2, 7]
    assert keys.unique().numel() == keys.numel()


def test_bfloat16_logits_are_widened_exactly():
    case = normal_case(9, 896, torch.bfloat16, CPU)
    wide = reference.route(case.logits.float(), case.bias, 16, True, 1.0)
    narrow = reference.route(case.logits, case.bias, 16, True, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("tokens", [1, 33])
def test_r11_ties(tokens):
    """Equal values take the lowest ids, biased ones first, and signed zeros tie."""
    zeros, bias = torch.zeros(tokens, 896), torch.zeros(896)
    _, ids = reference.route(zeros, bias, 16, True, 1.0)
    assert (ids == torch.arange(16)).all()
    bias[[3, 895]] = 0.1
    _, ids = reference.route(zeros, bias, 16, True, 1.0)
    assert (ids == torch.tensor([*range(15), 895])).all()
    zeros[:, ::2] = -0.0
    _, ids = reference.route(zeros, torch.zeros(896), 16, True, 1.0)
    assert (ids == torch.arange(16)).all()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_r13_scale_applied_once(renormalize, factor):
    case = adversarial_case("one_hot", 4, 896, torch.float32, CPU)
    weights, ids = reference.route(case.logits, case.bias, 16, renormalize, factor)
    score = reference.scores(case.logits).gather(1, ids.long())
    want = score / score.sum(1, keepdim=True) * factor if renormalize else score * factor
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-9)
    assert (ids == 5).any(1).all(), "bias 100 selects expert 5"
    assert (weights[ids == 5] < 1e-7).all(), "but its weight comes from the unbiased sigmoid of -20"


def test_zero_sum_divides_by_one():
    weights, ids = reference.route(torch.full((2, 896), -math.inf), torch.zeros(896), 16, True, 2.5)
    assert (weights == 0).all()
    assert (ids == torch.arange(16)).all()
