"""Memory in which a checkpoint's experts are loaded and then packed in place, one expert at a time.

Codes and scales of an expert take exactly as many bytes as its packed form. So one buffer [E, bytes] holds both in
turn: a framework loads into two views of it, and packing needs one expert's copy besides, never a second layer's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from chord.w4a16 import PackedW4A16, WeightShape
from chord.w4a16.layout import CODES_PER_WORD, SCALE_GROUP
from chord.w4a16.weights import pack_expert

_SUFFIXES = ("packed", "scale", "shape")
"""Of a projection's parameters in a compressed-tensors checkpoint."""


class Slabs(NamedTuple):
    """One projection of all experts before it is packed."""

    packed: PackedW4A16
    """What pack() fills; its bytes are the memory of both views."""
    codes: torch.Tensor
    """int32 [E, N, K / 8], each expert contiguous: where checkpoint words are loaded."""
    scale: torch.Tensor
    """bfloat16 [E, N, K / 32], likewise."""


def allocate(shape: WeightShape, device: torch.device | str | None = None) -> Slabs:
    """Uninitialised memory for one projection, on torch's default device if none is given."""
    data = torch.empty(shape.experts, shape.expert_bytes, dtype=torch.uint8, device=device)
    words, scales = shape.k // CODES_PER_WORD, shape.k // SCALE_GROUP
    code_bytes = shape.n * words * 4
    size = (shape.experts, shape.n)
    codes = data.view(torch.int32).as_strided((*size, words), (shape.expert_bytes // 4, words, 1))
    scale = data.view(torch.bfloat16).as_strided(
        (*size, scales), (shape.expert_bytes // 2, scales, 1), storage_offset=code_bytes // 2
    )
    return Slabs(PackedW4A16(data, shape), codes, scale)


def pack(slabs: Slabs) -> PackedW4A16:
    """Packs what was loaded, in place. The views hold packed bytes afterwards and must not be used any more."""
    for expert in range(slabs.packed.shape.experts):
        pack_expert(slabs.packed, expert, slabs.codes[expert].clone(), slabs.scale[expert].clone())
    return slabs.packed


def pack_tensors(codes: torch.Tensor, scale: torch.Tensor, *, gated: bool = False) -> PackedW4A16:
    """Packs loaded tensors: in place if they are the views of one `allocate`, else into new memory.

    codes: int32 [E, N, K / 8]. scale: bfloat16 [E, N, K / 32]. Raises TypeError or ValueError for anything else.
    """
    shape = WeightShape(codes.shape[0], codes.shape[1], codes.shape[2] * CODES_PER_WORD, gated)
    if _share_slabs(codes, scale, shape):
        storage = codes.untyped_storage()
        data = torch.empty(0, dtype=torch.uint8, device=codes.device)
        data.set_(storage, codes.storage_offset() * 4, (shape.experts, shape.expert_bytes), (shape.expert_bytes, 1))
        return pack(Slabs(PackedW4A16(data, shape), codes, scale))
    data = torch.empty(shape.experts, shape.expert_bytes, dtype=torch.uint8, device=codes.device)
    packed = PackedW4A16(data, shape)
    for expert in range(shape.experts):
        pack_expert(packed, expert, codes[expert].contiguous(), scale[expert].contiguous())
    return packed


def register_parameters(layer: torch.nn.Module, name: str, shape: WeightShape) -> list[torch.nn.Parameter]:
    """Gives a framework's layer a projection's parameters under compressed-tensors' names, for its loader to fill:
    <name>_weight_packed and _scale, two views of one buffer, and _shape, [E, 2], which nothing reads.
    """
    memory = allocate(shape)
    stated = torch.empty(shape.experts, 2)
    made = []
    for suffix, tensor in zip(_SUFFIXES, (memory.codes, memory.scale, stated), strict=True):
        made.append(torch.nn.Parameter(tensor, requires_grad=False))
        layer.register_parameter(f"{name}_weight_{suffix}", made[-1])
    return made


def pack_parameters(layer: torch.nn.Module, name: str, *, gated: bool = False) -> PackedW4A16:
    """Packs what a loader filled, and puts <name>_weight in place of the three. Errors as pack_tensors."""
    codes, scale = getattr(layer, f"{name}_weight_packed").data, getattr(layer, f"{name}_weight_scale").data
    packed = pack_tensors(codes, scale, gated=gated)
    for suffix in _SUFFIXES:
        delattr(layer, f"{name}_weight_{suffix}")
    layer.register_parameter(f"{name}_weight", torch.nn.Parameter(packed.data, requires_grad=False))
    return packed


def _share_slabs(codes: torch.Tensor, scale: torch.Tensor, shape: WeightShape) -> bool:
    words, scales = shape.k // CODES_PER_WORD, shape.k // SCALE_GROUP
    return (
        codes.stride() == (shape.expert_bytes // 4, words, 1)
        and scale.shape == (shape.experts, shape.n, scales)
        and scale.stride() == (shape.expert_bytes // 2, scales, 1)
        and scale.data_ptr() == codes.data_ptr() + shape.n * words * 4
        and codes.dtype == torch.int32
        and scale.dtype == torch.bfloat16
        and codes.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()
    )
