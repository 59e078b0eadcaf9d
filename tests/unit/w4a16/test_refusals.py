"""Arguments that fit by their bytes and are still not what they should be."""

from __future__ import annotations

import pytest
import torch

import chord
from chord.w4a16.grouped_rows import MaskedRows
from chord.w4a16.layout import WeightShape
from chord.w4a16.validate import check_inputs
from chord.w4a16.weights import pack_expert

TOKENS, TOP_K, EXPERTS = 5, 2, 4


def packed(n, k, gated):
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (EXPERTS, n, k // 8), dtype=torch.int32)
    return chord.pack_w4a16(words, torch.rand(EXPERTS, n, k // 32).to(torch.bfloat16), gated=gated)


@pytest.fixture(scope="module")
def given():
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).to(torch.int32)
    x = torch.randn(TOKENS, 128).to(torch.bfloat16)
    w13, w2 = packed(128, 128, True), packed(128, 64, False)
    return x, ids, chord.route_plan(ids, EXPERTS, 8), w13, w2


WIDTH = "x: expected rows of 128 values, as packed has them, got 64"


def test_rows_of_another_width(given):
    x, _, plan, w13, _ = given
    narrow, slabs = x[:, :64].contiguous(), torch.zeros(EXPERTS, 8, 64, dtype=torch.bfloat16)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    for indexed in (chord.moe_w4a16, chord.prepare_moe_w4a16):
        with pytest.raises(ValueError, match=WIDTH):
            indexed(narrow, w13, plan, top_k=TOP_K, block_m=8)
    for contiguous in (chord.moe_w4a16_contiguous, chord.prepare_moe_w4a16_contiguous):
        with pytest.raises(ValueError, match=WIDTH):
            contiguous(narrow, w13, offsets=offsets)
    for masked in (chord.moe_w4a16_masked, chord.prepare_moe_w4a16_masked):
        with pytest.raises(ValueError, match=WIDTH):
            masked(slabs, w13, counts, expected_rows=1)


def test_a_program_on_a_cpu(given):
    x, _, plan, w13, _ = given
    slabs, counts = torch.zeros(EXPERTS, 8, 128, dtype=torch.bfloat16), torch.zeros(EXPERTS, dtype=torch.int32)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    for prepare in (
        lambda name: chord.prepare_moe_w4a16(x, w13, plan, top_k=TOP_K, block_m=8, program=name),
        lambda name: chord.prepare_moe_w4a16_contiguous(x, w13, offsets=offsets, program=name),
        lambda name: chord.prepare_moe_w4a16_masked(slabs, w13, counts, expected_rows=1, program=name),
    ):
        with pytest.raises(ValueError, match=r"program: expected None for CPU tensors.*got 'moe_w4a16\.nonsense'"):
            prepare("moe_w4a16.nonsense")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, i: (x, w, i[:3]), r"topk_ids: expected shape \[5, any\]"),
        (lambda x, w, i: (x, w.T.contiguous(), i), r"topk_weights: expected shape \[5, 2\], got \[2, 5\]"),
        (lambda x, w, i: (x, w, i.flatten()), r"topk_ids: expected shape"),
        (lambda x, w, i: (x[:, :64].contiguous(), w, i), r"x: expected shape \[any, 128\]"),
    ],
)
def test_a_layer_whose_inputs_do_not_belong_together(given, change, message):
    x, ids, _, w13, w2 = given
    layer = chord.W4A16Experts(w13, w2)
    with pytest.raises(ValueError, match=message):
        layer(*change(x, torch.rand(TOKENS, TOP_K), ids))


@pytest.mark.parametrize("expert", [-1, EXPERTS, 99])
def test_an_expert_that_is_not_there(given, expert):
    words, scales = torch.zeros(128, 8, dtype=torch.int32), torch.zeros(128, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expert"):
        pack_expert(given[-1], expert, words, scales)


def unheld(*size, dtype=torch.bfloat16):
    """A tensor of a size that no test could hold; checks of types and shapes need no memory."""
    return torch.empty(*size, dtype=dtype, device="meta")


MANY = 1 << 31


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"x": unheld(MANY // 8, 64), "top_k": 8}, r"rows \* top_k: expected 0 to 2147483647, got 2147483648"),
        ({"x": unheld((1 << 29) + 1, 64), "top_k": 1}, r"elements of x: expected 0 to 34359738360, got 34359738432"),
        (
            {"ids": unheld(MANY, dtype=torch.int32)},
            r"sorted_token_ids \(entries\): expected 0 to 2147483647, got 21474",
        ),
        (
            {"owners": unheld(MANY, dtype=torch.int32)},
            r"expert_ids \(entries\): expected 0 to 2147483647, got 21474836",
        ),
    ],
)
def test_sizes_that_the_indexed_kernels_cannot_count(change, message):
    given = {"x": unheld((1 << 29) - 1, 64), "ids": unheld(MANY - 1, dtype=torch.int32), "top_k": 4}
    given |= {"owners": unheld(MANY - 1, dtype=torch.int32)} | change
    count, data = unheld(1, dtype=torch.int32), unheld(4, 64 * 64 * 9 // 16, dtype=torch.uint8)

    def check():
        return check_inputs(
            given["x"], data, given["ids"], given["owners"], count, None, False, given["top_k"], 8, expert_rows=1
        )

    if message is None:
        assert check() == WeightShape(4, 64, 64)
        return
    with pytest.raises(ValueError, match=message):
        check()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (unheld(4, (1 << 27) - 1, 64), None),
        (unheld(4, MANY // 4, 64), r"elements of x: expected 0 to 34359738360, got 137438953472"),
    ],
)
def test_slabs_that_the_kernels_cannot_count(x, message):
    rows, data = MaskedRows(unheld(4, dtype=torch.int32)), unheld(4, 64 * 64 * 9 // 16, dtype=torch.uint8)
    if message is None:
        assert rows.check(x, data, False) == WeightShape(4, 64, 64)
        return
    with pytest.raises(ValueError, match=message):
        rows.check(x, data, False)
