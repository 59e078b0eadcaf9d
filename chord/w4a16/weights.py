"""Packed INT4 weights as an object, from checkpoints and back: kernels for CUDA tensors, torch for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from chord.router.validate import check_devices, check_int, check_memory, check_tensor
from chord.w4a16 import launch, layout
from chord.w4a16.layout import CODES_PER_WORD, LAYOUT_VERSION, SCALE_GROUP, WeightShape

SCALE_LIMIT = 2.0**31


@dataclass(frozen=True, eq=False)
class PackedW4A16:
    """One projection of all experts in the packed layout. Raises TypeError or ValueError for anything else."""

    data: torch.Tensor = field(repr=False)
    """uint8 [E, n * k * 9 / 16]."""
    shape: WeightShape
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        check_int("layout_version", self.layout_version)
        if self.layout_version != LAYOUT_VERSION:
            raise ValueError(
                f"layout_version: this chord reads packed weights of version {LAYOUT_VERSION}, got "
                f"{self.layout_version}; pack them again from the checkpoint"
            )
        if not isinstance(self.shape, WeightShape):
            raise TypeError(f"shape: expected a WeightShape, got {self.shape!r:.80} ({type(self.shape).__name__})")
        check_tensor("data", self.data, (torch.uint8,), (self.shape.experts, self.shape.expert_bytes))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or of an object that was saved, which another chord may have done."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str) -> PackedW4A16:
        """The same weights on another device."""
        return PackedW4A16(self.data.to(device), self.shape, self.layout_version)


def pack_w4a16(codes: torch.Tensor, scale: torch.Tensor, *, gated: bool = False) -> PackedW4A16:
    """Packs one projection of all experts; the same bytes on every device.

    codes: int32 [E, N, K / 8], eight codes (value + 8) a word along K, lowest nibble first, as compressed-tensors'
        pack-quantized has them; or int32 [E, N, K], one code 0..15 each (checked, which on a GPU synchronises once).
    scale: bfloat16 [E, N, K / 32], one for an output and 32 consecutive k, below 2^31 in magnitude (checked, which on a
        GPU synchronises). N and K are multiples of 64.
    gated: the first N / 2 rows are gates, the others their up rows (w13); results then come in that order as well.
    Raises TypeError or ValueError for anything else: another group size, zero points and other types are not served.
    """
    shape, plain = _checkpoint_shape(codes, scale, gated)
    check_devices({"codes": codes, "scale": scale})
    _check_scales(scale)
    data = torch.empty(shape.experts, shape.expert_bytes, dtype=torch.uint8, device=codes.device)
    if codes.is_cuda:
        check_memory({"codes": codes, "scale": scale}, {})
        _pack_on_gpu(codes, scale, data, shape, plain)
    else:
        for expert in range(shape.experts):  # so that temporaries are those of one
            words = layout.words_from_codes(codes[expert]) if plain else codes[expert]
            data[expert] = layout.pack(words[None], scale[expert, None], gated=gated)[0]
    return PackedW4A16(data, shape)


def pack_expert(packed: PackedW4A16, expert: int, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Packs one expert's [N, K / 8] or [N, K] codes and [N, K / 32] scales, on packed's device, into its place.

    So that a checkpoint's experts need not be in memory at once. Errors as for pack_w4a16.
    """
    shape = packed.shape
    check_int("expert", expert, 0, shape.experts - 1)
    given, plain = _checkpoint_shape(codes[None], scale[None], shape.gated)
    if (given.n, given.k) != (shape.n, shape.k):
        raise ValueError(f"codes: expected a projection of {shape.n} x {shape.k}, got {given.n} x {given.k}")
    place = packed.data[expert : expert + 1]
    check_devices({"packed": place, "codes": codes, "scale": scale})
    if codes.is_cuda:
        check_memory({"codes": codes, "scale": scale}, {"packed": place})
        _check_scales(scale)
        _pack_on_gpu(codes, scale, place, given, plain)
    else:
        place.copy_(pack_w4a16(codes[None], scale[None], gated=shape.gated).data)


def unpack_w4a16(packed: PackedW4A16) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of pack_w4a16: (codes int32 [E, N, K / 8], scale bfloat16 [E, N, K / 32]), exactly what was packed.

    Raises TypeError for anything but a PackedW4A16.
    """
    if not isinstance(packed, PackedW4A16):
        raise TypeError(f"packed: expected a chord.PackedW4A16 (see chord.pack_w4a16), got {type(packed).__name__}")
    if not packed.data.is_cuda:
        return layout.unpack(packed.data, packed.shape)
    shape = packed.shape
    size = (shape.experts, shape.n)
    codes = torch.empty(*size, shape.k // CODES_PER_WORD, dtype=torch.int32, device=packed.device)
    scale = torch.empty(*size, shape.k // SCALE_GROUP, dtype=torch.bfloat16, device=packed.device)
    launch.unpack(packed.data, codes, scale, shape)
    return codes, scale


def _pack_on_gpu(codes: torch.Tensor, scale: torch.Tensor, data: torch.Tensor, shape: WeightShape, plain: bool) -> None:
    wrong = torch.zeros(1, dtype=torch.int32, device=codes.device)
    launch.pack(codes, scale, data, wrong, shape, plain=plain)
    if plain and int(wrong):
        raise ValueError(f"codes: expected 0 to 15 (value + 8), got {int(codes.min())} to {int(codes.max())}")


def _check_scales(scale: torch.Tensor) -> None:
    """The kernels multiply a scale by 2^96 before it meets a code, which above the limit is infinite."""
    scale = scale.detach()
    least, most = float(scale.min()), float(scale.max())
    if not (least > -SCALE_LIMIT and most < SCALE_LIMIT):  # so that NaN fails
        raise ValueError(f"scale: expected magnitudes below 2^31, got {least:g} to {most:g}")


def _checkpoint_shape(codes: torch.Tensor, scale: torch.Tensor, gated: bool) -> tuple[WeightShape, bool]:
    """The projection's shape, and whether the codes are plain. The scales say how long K is."""
    check_tensor("codes", codes, (torch.int32,), (None, None, None))
    check_tensor("scale", scale, (torch.bfloat16,), (*codes.shape[:2], None))
    k = scale.shape[2] * SCALE_GROUP
    if codes.shape[2] not in (k, k // CODES_PER_WORD):
        raise ValueError(
            f"codes, scale: expected [E, N, K/8] or [E, N, K] codes with one scale for {SCALE_GROUP} k, got "
            f"{list(codes.shape)} codes with {scale.shape[2]} scales a row; other group sizes are not served"
        )
    return WeightShape(codes.shape[0], codes.shape[1], k, gated), codes.shape[2] == k
