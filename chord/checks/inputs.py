"""Inputs for checking the router: ordinary draws and rows made to break a selection. All are made on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""The 14 measured sizes; with block_m 8 and 16 they are the 28 cells."""
ODD_TOKEN_COUNTS = (3, 5, 17, 31, 33, 100, 129, 200, 257, 300, 1000, 1025, 2047, 2049, 3000, 4097, 7392, 7393, 8000)
SELECTIONS = ((896, 16), (384, 8))
SPECIAL_BLOCK_M = (8, 16)
RUN_TIME_BLOCK_M = (24, 32, 64, 128, 248, 256)


class RouterCase(NamedTuple):
    """One call's inputs. logits: [M, E] float32 or bfloat16; bias: [E] float32."""

    name: str
    logits: torch.Tensor
    bias: torch.Tensor

    @property
    def top_k(self) -> int:
        return dict(SELECTIONS)[self.logits.shape[1]]


def normal_case(
    num_tokens: int, num_experts: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> RouterCase:
    """N(0, 1) logits, slightly tilted so that no two entries of a row or a column agree; bias 0.05 * N(0, 1)."""
    generator = torch.Generator(device=device).manual_seed(4568000 + 65537 * seed + num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator, device=device)
    logits += torch.arange(num_experts, device=device) * 1e-5
    logits += torch.arange(num_tokens, device=device)[:, None] * 1e-7
    bias = torch.randn(num_experts, generator=generator, device=device) * 0.05
    return RouterCase(f"normal_{num_tokens}", logits.to(dtype), bias)


def _equal(logits: torch.Tensor, bias: torch.Tensor) -> None:
    logits.zero_()
    bias.zero_()


def _two_ahead(logits: torch.Tensor, bias: torch.Tensor) -> None:
    _equal(logits, bias)
    bias[3] = 0.1
    bias[-1] = 0.1


def _signed_zeros(logits: torch.Tensor, bias: torch.Tensor) -> None:
    _equal(logits, bias)
    logits[:, 1::2] = -0.0
    bias[::3] = -0.0


def _hot_experts(logits: torch.Tensor, bias: torch.Tensor) -> None:
    """Every token takes the same experts, so their counts equal the number of tokens."""
    logits[:, ::29] += 40.0


def _one_hot(logits: torch.Tensor, bias: torch.Tensor) -> None:
    bias[5] = 100.0
    logits[:, 5] = -20.0


def _two_valued(logits: torch.Tensor, bias: torch.Tensor) -> None:
    logits.copy_((logits > 1.0).to(logits.dtype))
    bias.zero_()


def _boundary_ties(logits: torch.Tensor, bias: torch.Tensor) -> None:
    """The last place is shared by many experts, below three clear winners."""
    bias.zero_()
    logits.clamp_(max=1.5)
    logits[:, 200:203] = 3.0


def _nan_rows(logits: torch.Tensor, bias: torch.Tensor) -> None:
    """Row r has its first r * 53 mod (E + 1) experts NaN: none, few, all but few, all."""
    experts = logits.shape[1]
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    columns = torch.arange(experts, device=logits.device)
    logits.masked_fill_(columns < (rows * 53) % (experts + 1), float("nan"))


def _nan_signed(logits: torch.Tensor, bias: torch.Tensor) -> None:
    logits[:, 7] = float("nan")
    logits[:, 11] = torch.tensor(-1, dtype=torch.int16, device=logits.device).view(torch.bfloat16).to(logits.dtype)
    bias[2] = float("nan")


def _infinite(logits: torch.Tensor, bias: torch.Tensor) -> None:
    logits[:, ::5] = float("inf")
    logits[:, 1::5] = -float("inf")
    bias[3] = float("inf")
    bias[4] = -float("inf")


def _all_minus_infinite(logits: torch.Tensor, bias: torch.Tensor) -> None:
    """Every score is 0: the sum of the selected scores is 0 and divides by one."""
    logits.fill_(-float("inf"))


def _bias_minus_infinite(logits: torch.Tensor, bias: torch.Tensor) -> None:
    """All but three rank values are -inf; two are NaN and still rank below those."""
    bias.fill_(-float("inf"))
    bias[100:103] = 0.5
    bias[0:2] = float("nan")


def _denormal(logits: torch.Tensor, bias: torch.Tensor) -> None:
    logits.fill_(-100.0)
    bias.zero_()


def _tiny(logits: torch.Tensor, bias: torch.Tensor) -> None:
    """Scores from normal numbers down into the denormal ones."""
    logits.mul_(6.0).sub_(90.0)
    bias.zero_()


def _huge(logits: torch.Tensor, bias: torch.Tensor) -> None:
    logits.mul_(1e30)


ADVERSARIES: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "all_equal": _equal,
    "two_ahead": _two_ahead,
    "signed_zeros": _signed_zeros,
    "hot_experts": _hot_experts,
    "one_hot": _one_hot,
    "two_valued": _two_valued,
    "boundary_ties": _boundary_ties,
    "nan_rows": _nan_rows,
    "nan_signed": _nan_signed,
    "infinite": _infinite,
    "all_minus_infinite": _all_minus_infinite,
    "bias_minus_infinite": _bias_minus_infinite,
    "denormal": _denormal,
    "tiny": _tiny,
    "huge": _huge,
}
"""How each adversarial case changes ordinary logits [M, E] and bias [E] in place."""


def adversarial_case(
    kind: str, num_tokens: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> RouterCase:
    """One of ADVERSARIES."""
    case = normal_case(num_tokens, num_experts, dtype, device, seed=17)
    ADVERSARIES[kind](case.logits, case.bias)
    return RouterCase(f"{kind}_{num_tokens}", case.logits, case.bias)


def mixed_batch(
    num_tokens: int, num_experts: int, dtype: torch.dtype, device: torch.device, *, biased: bool = True
) -> RouterCase:
    """One batch whose rows are taken from all adversarial cases in turn, under the ordinary bias.

    biased=False: under none, so that equal logits are equal scores and the ids decide.
    """
    case = normal_case(num_tokens, num_experts, dtype, device, seed=18)
    if not biased:
        case.bias.zero_()
    for offset, change in enumerate(ADVERSARIES.values()):
        rows = case.logits[offset :: len(ADVERSARIES)]
        if rows.shape[0]:
            change(rows, case.bias.clone())
    return RouterCase(f"mixed_{num_tokens}", case.logits, case.bias)


def expert_parallel_ids(
    num_tokens: int, top_k: int, num_experts: int, device: torch.device, absent: float = 0.6, seed: int = 0
) -> torch.Tensor:
    """[M, k] int32 ids of local experts with a share of -1; row 0 is all -1. Repeats inside a row are possible."""
    generator = torch.Generator(device=device).manual_seed(991 + seed)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator, device=device, dtype=torch.int32)
    ids[torch.rand(num_tokens, top_k, generator=generator, device=device) < absent] = -1
    ids[:1] = -1
    return ids
