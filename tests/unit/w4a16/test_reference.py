"""The references against products written out, and against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chord.w4a16.layout import words_from_codes
from chord.w4a16.reference import block_rows, contract_weights, exact_weights, moe_w4a16, rms_error


def weights(experts: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (experts, n, k), generator=generator, dtype=torch.int32)
    scales = (torch.rand(experts, n, k // 32, generator=generator) * 0.04 + 0.005).to(torch.bfloat16)
    return codes, words_from_codes(codes), scales


def test_weights_are_code_minus_eight_times_scale() -> None:
    codes, words, scales = weights(2, 64, 64, 3)
    exact, rounded = exact_weights(words, scales), contract_weights(words, scales)
    for expert, n, k in [(0, 0, 0), (1, 63, 63), (0, 5, 31), (0, 5, 32), (1, 17, 40)]:
        value = (int(codes[expert, n, k]) - 8) * float(scales[expert, n, k // 32])
        assert float(exact[expert, n, k]) == value
        assert float(rounded[expert, n, k]) == float(torch.tensor(value, dtype=torch.float64).to(torch.bfloat16))


def test_rounding_once_is_what_bfloat16_arithmetic_does() -> None:
    """code - 8 is exact in bfloat16, so a bfloat16 multiply gives the same bits: what the kernels compute."""
    codes, words, scales = weights(1, 64, 128, 4)
    product = (codes - 8).to(torch.bfloat16) * scales.repeat_interleave(32, dim=-1)
    assert torch.equal(product, contract_weights(words, scales))


def test_blocks_without_expert_and_ids_without_row_count_for_nothing() -> None:
    ids = torch.tensor([0, 3, 8, -1, 1, 2, 99, 8, 4, 8, 8, 8, 5, 6, 7, 7], dtype=torch.int32)
    experts = torch.tensor([1, -1, 1, 0], dtype=torch.int32)
    rows = block_rows(ids, experts, torch.tensor([12]), block_m=4, num_experts=2, num_pairs=8)
    assert {expert: pairs.tolist() for expert, pairs in rows.items()} == {1: [0, 3, 4]}
    every = block_rows(ids, experts, torch.tensor(99), block_m=4, num_experts=2, num_pairs=8)
    assert every[0].tolist() == [5, 6, 7, 7]
    assert block_rows(ids, experts, torch.tensor([0]), block_m=4, num_experts=2, num_pairs=8) == {}


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 1 << 20))
def test_operator_is_the_product_written_out(tokens: int, top_k: int, weighted: bool, seed: int) -> None:
    _, words, scales = weights(3, 64, 64, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 64, generator=generator).to(torch.bfloat16)
    pairs = tokens * top_k
    expert_of = torch.randint(-1, 3, (pairs,), generator=generator)
    rows = {e: (expert_of == e).nonzero().flatten() for e in range(3) if (expert_of == e).any()}
    factors = torch.rand(pairs, generator=generator) if weighted else None
    out = torch.full((pairs, 64), 7.0, dtype=torch.bfloat16)
    moe_w4a16(x, words, scales, rows, top_k=top_k, row_weight=factors, out=out)
    dense = contract_weights(words, scales).to(torch.float64)
    for pair in range(pairs):
        if expert_of[pair] < 0:
            assert (out[pair] == 7).all()
            continue
        want = dense[expert_of[pair]] @ x[pair // top_k].to(torch.float64)
        want = want * float(factors[pair]) if factors is not None else want
        torch.testing.assert_close(out[pair].to(torch.float64), want, rtol=2**-7, atol=1e-5)


def test_the_contracts_rounding_is_the_error_left() -> None:
    _, words, scales = weights(1, 256, 1024, 5)
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    rows = {0: torch.arange(64)}
    exact = moe_w4a16(x, words, scales, rows, top_k=1, exact=True)
    assert exact.dtype == torch.float64
    error = rms_error(moe_w4a16(x, words, scales, rows, top_k=1), exact)
    assert 5e-4 < error < 4e-3
    assert rms_error(exact, exact) == 0
    with pytest.raises(AssertionError):
        assert rms_error(exact * float("nan"), exact) < 1
