"""Packing in place: the bytes are those of pack_w4a16, in the memory that held the checkpoint."""

from __future__ import annotations

import pytest
import torch

from chord import pack_w4a16
from chord.integrations import slabs
from chord.w4a16 import WeightShape

SHAPES = [WeightShape(3, 128, 192, gated=True), WeightShape(2, 320, 64), WeightShape(1, 64, 64)]


def checkpoint(shape: WeightShape) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(shape.n)
    words = torch.randint(-(1 << 31), 1 << 31, (shape.experts, shape.n, shape.k // 8), generator=random)
    scale = torch.rand(shape.experts, shape.n, shape.k // 32, generator=random)
    return words.to(torch.int32), scale.to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_place(shape: WeightShape) -> None:
    words, scale = checkpoint(shape)
    memory = slabs.allocate(shape)
    for expert in range(shape.experts):  # as loaders do it
        memory.codes[expert].copy_(words[expert])
        memory.scale[expert].copy_(scale[expert])
    assert torch.equal(memory.codes, words)
    assert torch.equal(memory.scale, scale)
    packed = slabs.pack_tensors(
        torch.nn.Parameter(memory.codes, requires_grad=False).data, memory.scale, gated=shape.gated
    )
    assert packed.data.untyped_storage().data_ptr() == memory.packed.data.untyped_storage().data_ptr()
    assert packed.shape == shape
    assert torch.equal(packed.data, pack_w4a16(words, scale, gated=shape.gated).data)


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_of_their_own_are_copied(shape: WeightShape) -> None:
    words, scale = checkpoint(shape)
    packed = slabs.pack_tensors(words, scale, gated=shape.gated)
    assert torch.equal(packed.data, pack_w4a16(words, scale, gated=shape.gated).data)
    again, _ = checkpoint(shape)
    assert torch.equal(words, again)


def test_views_that_a_host_moved_are_copied() -> None:
    """Moving parameters makes each a tensor of its own."""
    shape = SHAPES[0]
    words, scale = checkpoint(shape)
    memory = slabs.allocate(shape)
    memory.codes.copy_(words)
    memory.scale.copy_(scale)
    packed = slabs.pack_tensors(memory.codes.contiguous(), memory.scale.contiguous(), gated=True)
    assert torch.equal(packed.data, pack_w4a16(words, scale, gated=True).data)


def test_wrong_scales_are_refused() -> None:
    words, scale = checkpoint(SHAPES[0])
    with pytest.raises(ValueError, match=r"codes, scale: expected"):
        slabs.pack_tensors(words, scale[..., :-1].contiguous())
