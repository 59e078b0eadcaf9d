"""The kernels that move, activate and sum rows, on a GPU."""

from __future__ import annotations

import pytest
import torch

from chord.checks import w4a16_rows as rows
from chord.w4a16.rows import combine_rows, swiglu_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("operator", rows.OPERATORS)
def test_right_and_within_bounds(operator: str) -> None:
    assert not any(rows.row_problems(operator, torch.device("cuda")))


def test_captured_with_changing_bounds() -> None:
    gate_up = torch.randn(12, 512, device="cuda").to(torch.bfloat16)
    limit = torch.tensor([4], device="cuda")
    out = torch.full((12, 256), 7.0, dtype=torch.bfloat16, device="cuda")
    swiglu_rows(gate_up, out, limit=limit)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swiglu_rows(gate_up, out, limit=limit)
    wanted = (torch.nn.functional.silu(gate_up[:, :256].float()) * gate_up[:, 256:].float()).to(torch.bfloat16)
    for count in (0, 7, 12):
        limit.fill_(count)
        out.fill_(7.0)
        graph.replay()
        torch.testing.assert_close(out[:count], wanted[:count], rtol=2**-7, atol=1e-4)
        assert (out[count:] == 7.0).all()


def test_sums_keep_the_order_of_the_routes() -> None:
    """The same bits in every run, and for a token alone."""
    routed = torch.randn(300 * 8, 7168, device="cuda").to(torch.bfloat16)
    weights = torch.rand(300, 8, device="cuda")
    ids = torch.zeros(300, 8, dtype=torch.int32, device="cuda")
    whole, again = (torch.empty(300, 7168, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for out in (whole, again):
        combine_rows(routed, out, weights, ids, num_experts=1)
    assert torch.equal(whole, again)
    alone = torch.empty(1, 7168, dtype=torch.bfloat16, device="cuda")
    combine_rows(routed[8:16].clone(), alone, weights[1:2].clone(), ids[1:2].clone(), num_experts=1)
    assert torch.equal(alone, whole[1:2])
