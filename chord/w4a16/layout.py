"""The packed weight layout, version 1, on any torch device: what the packing kernel writes, bit for bit.

    packed: uint8 [E, N/64 * K/64 * 2304], each expert [N/256 groups][K/64][strips][2304]

A group holds four strips of 64 outputs; the last group of an N that is no multiple of 256 holds fewer. A block is 64
outputs x 64 k: 2048 bytes of codes, then 256 bytes of bfloat16 scales. The code of (n, k) inside a block, with
w = n / 16, r = n % 16 and lane = (r % 8) * 4 + (k % 8) / 2, lies in the 32-bit word at byte w * 512 + lane * 16 +
(k / 16) * 4, in nibble r / 8 + 2 * ((k % 16) / 8) + 4 * (k % 2), as q + 8. The scale of (n, group g = k / 32) lies at
byte 2048 + g * 128 + (r % 8) * 16 + w * 4 + (r / 8) * 2. So a lane's four words are the A fragments of four k16 steps.

Gated projections (gate and up stacked along N) are packed with their rows interleaved: 8 gate rows, then their 8 up
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chord.router.validate import check_bool, check_int

LAYOUT_VERSION = 1
BLOCK = 64
"""Outputs and k of a block."""
BLOCK_BYTES = 2304
SCALE_GROUP = 32
"""Consecutive k that share a scale."""
STRIPS = 4
"""Strips of 64 outputs in a whole group."""
MAX_EXPERTS = 1024
MAX_SIZE = 1 << 20
"""Most outputs, and most k: as far as the routes go."""
CODES_PER_WORD = 8

_CODE_BYTES = 2048


@dataclass(frozen=True)
class WeightShape:
    """One projection of all experts, [experts, n, k]. Raises TypeError or ValueError for sizes that no kernel takes."""

    experts: int
    n: int
    k: int
    gated: bool = False

    def __post_init__(self) -> None:
        check_int("experts", self.experts, 1, MAX_EXPERTS)
        for name, size in (("n", self.n), ("k", self.k)):
            check_int(name, size)
            if size <= 0 or size % BLOCK:
                raise ValueError(f"{name}: expected a positive multiple of {BLOCK}, got {size}")
            if size > MAX_SIZE:
                raise ValueError(f"{name}: expected at most {MAX_SIZE}, as far as the routes go, got {size}")
        check_bool("gated", self.gated)

    @property
    def expert_bytes(self) -> int:
        """Packed size of one expert."""
        return self.n // BLOCK * (self.k // BLOCK) * BLOCK_BYTES

    def outputs(self, swiglu: bool) -> int:
        """Columns of a result: n, or its half where gate and up rows become one."""
        return self.n // 2 if swiglu else self.n

    @property
    def blocks(self) -> int:
        """Blocks of all experts, in the order in which they lie in memory."""
        return self.experts * (self.n // BLOCK) * (self.k // BLOCK)


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """[N, ...] with gate rows, then up rows -> 8 gate rows, their 8 up rows, the next 8 gate rows, and so on."""
    halves = rows.reshape(2, rows.shape[0] // 16, 8, *rows.shape[1:])
    return halves.transpose(0, 1).reshape(rows.shape)


def separate(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of interleave."""
    pairs = rows.reshape(rows.shape[0] // 16, 2, 8, *rows.shape[1:])
    return pairs.transpose(0, 1).reshape(rows.shape)


def words_from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, int32 [..., K] -> checkpoint words, int32 [..., K / 8]: lowest nibble first along K.

    Raises ValueError when a code lies outside 0..15.
    """
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
    if low < 0 or high > 15:
        raise ValueError(f"codes: expected 0 to 15 (value + 8), got {low} to {high}")
    parts = codes.reshape(*codes.shape[:-1], -1, CODES_PER_WORD).to(torch.uint8)
    return (parts[..., 0::2] | parts[..., 1::2] << 4).contiguous().view(torch.int32).squeeze(-1)


def codes_from_words(words: torch.Tensor) -> torch.Tensor:
    """Inverse of words_from_codes: int32 [..., K / 8] -> uint8 [..., K]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)


def pack(words: torch.Tensor, scales: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """Checkpoint words int32 [E, N, K / 8] and scales bfloat16 [E, N, K / 32] -> packed uint8 [E, bytes].

    One expert at a time, so that temporaries stay within a few experts' size. Raises ValueError for sizes or types that
    do not fit together.
    """
    shape = _checked_shape(words, scales, gated)
    packed = torch.empty(shape.experts, shape.expert_bytes, dtype=torch.uint8, device=words.device)
    for expert in range(shape.experts):
        rows, row_scales = words[expert], scales[expert]
        if gated:
            rows, row_scales = interleave(rows), interleave(row_scales)
        blocks = torch.cat([_code_bytes(rows, shape), _scale_bytes(row_scales, shape)], dim=-1)
        whole = shape.n // BLOCK // STRIPS * STRIPS
        packed[expert] = torch.cat([_grouped(blocks[:whole]), _grouped(blocks[whole:])])
    return packed


def unpack(packed: torch.Tensor, shape: WeightShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of pack: (words int32 [E, N, K / 8], scales bfloat16 [E, N, K / 32]).

    Raises ValueError for a tensor of another size.
    """
    if packed.dtype != torch.uint8 or packed.shape != (shape.experts, shape.expert_bytes):
        raise ValueError(
            f"packed: expected uint8 [{shape.experts}, {shape.expert_bytes}] for {shape}, got {packed.dtype} "
            f"{list(packed.shape)}"
        )
    device = packed.device
    words = torch.empty(shape.experts, shape.n, shape.k // CODES_PER_WORD, dtype=torch.int32, device=device)
    scales = torch.empty(shape.experts, shape.n, shape.k // SCALE_GROUP, dtype=torch.bfloat16, device=device)
    for expert in range(shape.experts):
        blocks = _ungrouped(packed[expert], shape)
        rows = _words_from_bytes(blocks[..., :_CODE_BYTES], shape)
        row_scales = _scales_from_bytes(blocks[..., _CODE_BYTES:], shape)
        words[expert] = separate(rows) if shape.gated else rows
        scales[expert] = separate(row_scales) if shape.gated else row_scales
    return words, scales


def _checked_shape(words: torch.Tensor, scales: torch.Tensor, gated: bool) -> WeightShape:
    if words.dtype != torch.int32 or words.dim() != 3:
        raise ValueError(f"words: expected int32 [E, N, K/8], got {words.dtype} {list(words.shape)}")
    shape = WeightShape(words.shape[0], words.shape[1], words.shape[2] * CODES_PER_WORD, gated)
    wanted = (shape.experts, shape.n, shape.k // SCALE_GROUP)
    if scales.dtype != torch.bfloat16 or scales.shape != wanted:
        raise ValueError(f"scales: expected bfloat16 {list(wanted)}, got {scales.dtype} {list(scales.shape)}")
    return shape


def _code_bytes(rows: torch.Tensor, shape: WeightShape) -> torch.Tensor:
    """Checkpoint words [N, K/8] of one expert -> uint8 [strips, K/64, 2048].

    Byte c of a checkpoint word holds the codes of k = 2 c and 2 c + 1. The four bytes that a lane's word is made of
    differ in half of the 16 rows (v) and in half of the 16 k (h): nibbles v + 2 h take the low codes, 4 + v + 2 h the
    high ones.
    """
    pairs = rows.contiguous().view(torch.uint8).view(shape.n // BLOCK, 4, 2, 8, shape.k // BLOCK, 4, 2, 4)
    # strip, warp w, half v, row g, k64, k16, half h, column c -> strip, k64, w, g, c, k16, h, v
    lanes = pairs.permute(0, 4, 1, 3, 7, 5, 6, 2)
    even, odd = lanes & 15, lanes >> 4
    low = even[..., 0] | even[..., 1] << 4
    high = odd[..., 0] | odd[..., 1] << 4
    return torch.cat([low, high], dim=-1).reshape(shape.n // BLOCK, shape.k // BLOCK, _CODE_BYTES)


def _words_from_bytes(blocks: torch.Tensor, shape: WeightShape) -> torch.Tensor:
    """Inverse of _code_bytes."""
    lanes = blocks.reshape(shape.n // BLOCK, shape.k // BLOCK, 4, 8, 4, 4, 2, 2)  # ..., low or high codes, h
    low, high = lanes[..., 0, :], lanes[..., 1, :]
    pairs = torch.stack([low & 15 | (high & 15) << 4, low >> 4 | high >> 4 << 4], dim=-1)  # ..., h, v
    rows = pairs.permute(0, 2, 7, 3, 1, 5, 6, 4).contiguous()
    return rows.view(shape.n, shape.k // 2).view(torch.int32)


def _scale_bytes(scales: torch.Tensor, shape: WeightShape) -> torch.Tensor:
    """Scales [N, K/32] of one expert -> uint8 [strips, K/64, 256]."""
    parts = scales.reshape(shape.n // BLOCK, 4, 2, 8, shape.k // BLOCK, 2)  # strip, w, half v, row g, k64, group
    blocks = parts.permute(0, 4, 5, 3, 1, 2).contiguous()
    return blocks.view(shape.n // BLOCK, shape.k // BLOCK, 128).view(torch.uint8)


def _scales_from_bytes(blocks: torch.Tensor, shape: WeightShape) -> torch.Tensor:
    """Inverse of _scale_bytes."""
    parts = blocks.contiguous().view(torch.bfloat16).view(shape.n // BLOCK, shape.k // BLOCK, 2, 8, 4, 2)
    return parts.permute(0, 4, 5, 3, 1, 2).reshape(shape.n, shape.k // SCALE_GROUP)


def _grouped(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [strips, K/64, 2304] -> flat bytes [groups][K/64][strips]. Fewer than four strips are a group, too."""
    strips = min(STRIPS, max(1, blocks.shape[0]))
    return blocks.reshape(-1, strips, *blocks.shape[1:]).transpose(1, 2).reshape(-1)


def _ungrouped(flat: torch.Tensor, shape: WeightShape) -> torch.Tensor:
    """Inverse of _grouped over both parts: the bytes of one expert -> [strips, K/64, 2304]."""
    strips, k_blocks = shape.n // BLOCK, shape.k // BLOCK
    whole = strips // STRIPS * STRIPS
    cut = whole * k_blocks * BLOCK_BYTES
    first = flat[:cut].view(-1, k_blocks, STRIPS, BLOCK_BYTES).transpose(1, 2).reshape(whole, k_blocks, BLOCK_BYTES)
    rest = flat[cut:].view(k_blocks, strips - whole, BLOCK_BYTES).transpose(0, 1)
    return torch.cat([first, rest])
