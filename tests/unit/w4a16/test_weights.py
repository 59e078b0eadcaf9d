"""What packing refuses before a kernel sees it."""

import math

import pytest
import torch

import chord
from chord.w4a16.layout import WeightShape


@pytest.mark.parametrize("wrong", [2.0**31, -(2.0**40), math.inf, math.nan])
def test_scales_that_the_kernels_cannot_multiply_are_refused(wrong: float) -> None:
    codes = torch.zeros(2, 64, 8, dtype=torch.int32)
    scale = torch.ones(2, 64, 2, dtype=torch.bfloat16)
    packed = chord.pack_w4a16(codes, scale * (2.0**31 * 0.99))
    scale[1, 5, 1] = wrong
    with pytest.raises(ValueError, match=r"scale: expected magnitudes below 2\^31, got"):
        chord.pack_w4a16(codes, scale)
    with pytest.raises(ValueError, match=r"scale: expected magnitudes below 2\^31, got"):
        chord.w4a16.weights.pack_expert(packed, 1, codes[1], scale[1])
    assert packed.shape == WeightShape(2, 64, 64)
