"""What packing refuses, and what it costs, before a kernel sees it."""

import copy
import math
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import chord
from chord.w4a16.layout import WeightShape, words_from_codes


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


class Storages(TorchDispatchMode):
    """Notes the bytes of every storage that an operation makes."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.bytes.append(storage.nbytes())
        return result


@pytest.mark.parametrize("plain", [False, True])
def test_packing_on_a_cpu_has_temporaries_of_one_expert(plain: bool) -> None:
    experts, n, k = 16, 128, 192
    codes = torch.randint(0, 16, (experts, n, k), dtype=torch.int32)
    scale = torch.rand(experts, n, k // 32).to(torch.bfloat16)
    given = codes if plain else words_from_codes(codes)
    with Storages(given, scale) as made:
        packed = chord.pack_w4a16(given, scale)
    final = packed.data.nbytes
    others = [size for size in made.bytes if size != final]
    assert max(others) <= 2 * n * k, "one byte for each code of an expert, twice at most"
    assert torch.equal(packed.data, chord.pack_w4a16(words_from_codes(codes), scale).data)


@pytest.mark.parametrize("again", [copy.copy, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_a_copy_of_another_layout_is_refused(again) -> None:
    packed = chord.pack_w4a16(torch.zeros(2, 64, 8, dtype=torch.int32), torch.ones(2, 64, 2, dtype=torch.bfloat16))
    assert torch.equal(again(packed).data, packed.data)
    object.__setattr__(packed, "layout_version", 2)  # as another chord might have saved it
    with pytest.raises(ValueError, match=r"layout_version: this chord reads packed weights of version 1, got 2; pack"):
        again(packed)
