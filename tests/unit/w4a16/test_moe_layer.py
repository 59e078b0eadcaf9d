"""A whole MoE layer out of the public operators, on a CPU with small experts, against float64."""

import torch

import chord
from chord.w4a16.layout import words_from_codes
from chord.w4a16.reference import contract_weights

TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 7, 384, 8, 64, 64


def draw(experts: int, n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (experts, n, k), generator=generator, dtype=torch.int32)
    scale = torch.rand(experts, n, k // 32, generator=generator) * 0.02 + 0.005
    return words_from_codes(codes), scale.to(torch.bfloat16)


def test_router_gate_up_swiglu_down_and_weighted_sum():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    bias = torch.zeros(EXPERTS)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    w13, w2 = draw(EXPERTS, 2 * INTER, HIDDEN, generator), draw(EXPERTS, HIDDEN, INTER, generator)
    gate_up, down = chord.pack_w4a16(*w13, gated=True), chord.pack_w4a16(*w2)

    weights, ids, plan = chord.fused_router(logits, bias, top_k=TOP_K, block_m=8)
    hidden = chord.moe_w4a16(x, gate_up, plan, top_k=TOP_K, block_m=8)
    gate, up = hidden.chunk(2, dim=1)
    active = torch.nn.functional.silu(gate) * up
    routed = chord.moe_w4a16(active, down, plan, top_k=1, block_m=8, row_weight=weights.flatten())
    result = routed.view(TOKENS, TOP_K, HIDDEN).sum(dim=1)

    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    dense13, dense2 = contract_weights(*w13).to(torch.float64), contract_weights(*w2).to(torch.float64)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            first, second = (dense13[expert] @ x[token].to(torch.float64)).chunk(2)
            exact[token] += weight * (dense2[expert] @ (torch.nn.functional.silu(first) * second))
    error = (result - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 1e-2
