"""The packed layout against its definition, one code at a time, and its inverses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chord.registry import Registry
from chord.w4a16.launch import GEMMS
from chord.w4a16.layout import (
    BLOCK,
    BLOCK_BYTES,
    MAX_EXPERTS,
    MAX_SIZE,
    WeightShape,
    codes_from_words,
    interleave,
    pack,
    separate,
    unpack,
    words_from_codes,
)

SHAPES = st.builds(
    WeightShape,
    experts=st.integers(1, 3),
    n=st.integers(1, 9).map(lambda strips: 64 * strips),
    k=st.integers(1, 5).map(lambda blocks: 64 * blocks),
    gated=st.booleans(),
)


def checkpoint(shape: WeightShape, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (shape.experts, shape.n, shape.k), generator=generator, dtype=torch.int32)
    bits = torch.randint(-(1 << 15), 1 << 15, (shape.experts, shape.n, shape.k // 32), generator=generator)
    return codes, bits.to(torch.int16).view(torch.bfloat16)


def packed_row(shape: WeightShape, row: int) -> int:
    """Where the checkpoint's row lies among the packed rows."""
    if not shape.gated:
        return row
    up, place = divmod(row, shape.n // 2)
    return place // 8 * 16 + up * 8 + place % 8


def block_start(shape: WeightShape, expert: int, n: int, k: int) -> int:
    group, strips = n // 256, shape.n // 64
    in_group = min(4, strips - group * 4)
    block = (group * 4 * (shape.k // 64)) + k // 64 * in_group + n % 256 // 64
    return expert * shape.expert_bytes + block * BLOCK_BYTES


def test_every_code_and_scale_lies_where_the_layout_says() -> None:
    shape = WeightShape(2, 320, 128, gated=True)
    codes, scales = checkpoint(shape, 1)
    flat = pack(words_from_codes(codes), scales, gated=True).flatten()
    words, halves = flat.view(torch.int32).tolist(), flat.view(torch.int16).tolist()
    scale_bits = scales.view(torch.int16).tolist()
    for expert in range(shape.experts):
        for row in range(0, shape.n, 7):
            n = packed_row(shape, row)
            w, r = n % 64 // 16, n % 16
            for k in range(shape.k):
                start = block_start(shape, expert, n, k)
                lane = r % 8 * 4 + k % 8 // 2
                word = words[(start + w * 512 + lane * 16 + k % 64 // 16 * 4) // 4]
                nibble = r // 8 + 2 * (k % 16 // 8) + 4 * (k % 2)
                assert word >> 4 * nibble & 15 == codes[expert, row, k]
                at = start + 2048 + k % 64 // 32 * 128 + r % 8 * 16 + w * 4 + r // 8 * 2
                assert halves[at // 2] == scale_bits[expert][row][k // 32]


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1 << 30))
def test_unpack_restores_every_bit(shape: WeightShape, seed: int) -> None:
    codes, scales = checkpoint(shape, seed)
    words = words_from_codes(codes)
    packed = pack(words, scales, gated=shape.gated)
    assert packed.shape == (shape.experts, shape.expert_bytes)
    assert packed.numel() == shape.blocks * BLOCK_BYTES == codes.numel() * 9 // 16
    restored_words, restored_scales = unpack(packed, shape)
    assert torch.equal(restored_words, words)
    assert torch.equal(restored_scales.view(torch.int16), scales.view(torch.int16))
    assert torch.equal(codes_from_words(restored_words).to(torch.int32), codes)


@settings(deadline=None)
@given(SHAPES, st.integers(0, 1 << 30))
def test_strips_lie_one_after_another_in_groups_of_four(shape: WeightShape, seed: int) -> None:
    """An expert's first 64 * s outputs alone pack to the same blocks, so shards can be cut at multiples of 256."""
    codes, scales = checkpoint(shape, seed)
    words = words_from_codes(codes)
    packed = pack(words, scales)
    cut = shape.n // 256 * 256
    if cut:
        first = pack(words[:, :cut].contiguous(), scales[:, :cut].contiguous())
        assert torch.equal(packed[:, : first.shape[1]], first)


@given(st.integers(1, 6), st.integers(1, 3))
def test_interleave_alternates_eight_gate_and_eight_up_rows(sixteens: int, width: int) -> None:
    rows = torch.arange(16 * sixteens * width).reshape(16 * sixteens, width)
    mixed = interleave(rows)
    for place in range(16 * sixteens):
        half, within = place // 8 % 2, place // 16 * 8 + place % 8
        assert torch.equal(mixed[place], rows[half * 8 * sixteens + within])
    assert torch.equal(separate(mixed), rows)


def test_lowest_nibble_comes_first() -> None:
    words = words_from_codes(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.int32))
    assert words.shape == (1, 1)
    assert words.item() & 0xFFFFFFFF == 0x87654321


@pytest.mark.parametrize("wrong", [-1, 16])
def test_codes_outside_four_bits_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"expected 0 to 15.*{wrong}"):
        words_from_codes(torch.tensor([0, 1, 2, wrong, 4, 5, 6, 7], dtype=torch.int32))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 64, 64), "experts: expected 1 to 1024, got 0"),
        ((1025, 64, 64), "experts: expected 1 to 1024, got 1025"),
        ((1, 96, 64), "n: expected a positive multiple of 64, got 96"),
        ((1, 64, 0), "k: expected a positive multiple of 64, got 0"),
        ((1, 64, (1 << 20) + 64), "k: expected at most 1048576, as far as the routes go, got 1048640"),
        ((1, (1 << 20) + 64, 64), "n: expected at most 1048576"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightShape(*shape)


def test_every_shape_that_can_be_packed_has_routes() -> None:
    operators = Registry.open().manifest.operators
    for name in GEMMS:
        ends = {axis.keys[0]: (axis.first, axis.last, axis.step) for axis in operators[name].axes}
        assert ends["n"] == ends["k"] == (BLOCK, MAX_SIZE, BLOCK)
        assert ends["experts"] == (1, MAX_EXPERTS, 1)


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales = checkpoint(WeightShape(1, 64, 128), 0)
    words = words_from_codes(codes)
    with pytest.raises(ValueError, match="words: expected int32"):
        pack(words.to(torch.int64), scales)
    with pytest.raises(ValueError, match=r"scales: expected bfloat16 \[1, 64, 4\]"):
        pack(words, scales[:, :, :2])
    with pytest.raises(ValueError, match="packed: expected uint8"):
        unpack(pack(words, scales), WeightShape(1, 64, 64))
