"""Qualifying the present GPU for W4A16: every GEMM program over shapes, routings and block sizes, and the packers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch

from chord import _runtime
from chord.checks import w4a16_combine as combine
from chord.checks import w4a16_grouped as grouped
from chord.checks import w4a16_rows as rows
from chord.checks.qualify import Seconds, Verdict, matches, verdicts_of
from chord.checks.w4a16 import ROUTINGS, Expected, checkpoint, gemm_case, gemm_problems, placed
from chord.w4a16 import launch, layout, pack_w4a16, unpack_w4a16
from chord.w4a16.layout import WeightShape

Problems = dict[str, list[list[str]]]
"""By program and case."""
PACKERS = ("w4a16_pack", "w4a16_unpack")


class Load(NamedTuple):
    """A GEMM's weights and how much work it gets."""

    shape: WeightShape
    tokens: int
    top_k: int
    block_m: int


LOADS = (
    Load(WeightShape(1, 64, 64), 5, 8, 8),
    Load(WeightShape(8, 320, 192), 50, 8, 8),
    Load(WeightShape(8, 448, 320, gated=True), 90, 4, 64),
    Load(WeightShape(8, 512, 1024, gated=True), 700, 8, 24),
    Load(WeightShape(48, 4096, 7168, gated=True), 50, 8, 8),
    Load(WeightShape(48, 7168, 2048), 400, 1, 8),
    Load(WeightShape(384, 512, 7168, gated=True), 2, 8, 8),
    Load(WeightShape(384, 512, 7168, gated=True), 1024, 8, 16),
    Load(WeightShape(384, 7168, 256), 8192, 1, 16),
    Load(WeightShape(384, 64, 256), 7000, 8, 16),
    Load(WeightShape(16, 1088, 448, gated=True), 1500, 2, 8),
)
TINY_LOADS = (
    Load(WeightShape(3, 64, 64), 4, 2, 8),
    Load(WeightShape(5, 320, 320, gated=True), 21, 4, 16),
    Load(WeightShape(3, 192, 256), 40, 2, 24),
    Load(WeightShape(2, 128, 448), 6, 2, 8),
)
"""Small enough for a sanitizer. The first is the smallest that there is: a brief run leaves it out. Blocks of 24 rows
are what no arm looks at in one step, and a K of 448 has several stages in all.
"""
TINY_TALL = Load(WeightShape(280, 64, 448), 2450, 8, 64)
"""For all but a brief run, as it fills the GPU: a CTA has several tiles of some 70 rows, of which no two find room at
once in the resident programs of tall tiles.
"""
TINY_ROUTINGS = ("random", "remote")

SUMS = (
    Load(WeightShape(1, 64, 64), 5, 8, 8),
    Load(WeightShape(8, 320, 192), 50, 8, 8),
    Load(WeightShape(48, 7168, 2048), 50, 8, 8),
    Load(WeightShape(384, 7168, 256), 300, 8, 8),
    Load(WeightShape(16, 1088, 448), 700, 2, 16),
    Load(WeightShape(3, 2112, 128), 40, 11, 8),
)
TINY_SUMS = (Load(WeightShape(3, 64, 64), 4, 2, 8), Load(WeightShape(5, 704, 256), 9, 3, 16))
"""Of those that sum a token's rows; so many tokens, top_k rows each."""


class Slabs(NamedTuple):
    """A grouped GEMM's weights and the rows that an expert has about."""

    shape: WeightShape
    mean: int


SLABS = (
    Slabs(WeightShape(1, 64, 64), 5),
    Slabs(WeightShape(8, 320, 192), 21),
    Slabs(WeightShape(8, 448, 320, gated=True), 70),
    Slabs(WeightShape(24, 4096, 7168, gated=True), 8),
    Slabs(WeightShape(12, 7168, 2048), 150),
    Slabs(WeightShape(384, 512, 7168, gated=True), 4),
)
TINY_SLABS = (Slabs(WeightShape(3, 64, 64), 4), Slabs(WeightShape(5, 320, 320, gated=True), 9))
TINY_SPREADS = ("ragged", "full")


def qualify_w4a16(
    device: int,
    *,
    tiny: bool = False,
    brief: bool = False,
    only: str = "*",
    progress: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Runs every program of the GEMMs that was built for the device, then the packers and those that move rows.

    tiny: small inputs, made and judged on the host. brief: of the GEMMs' the fewest that run every part of a kernel.
    only: shell patterns, separated by commas, of which a program's name must match one.
    """
    arch = _runtime.architecture(device)
    place = torch.device("cuda", device)
    verdicts: list[Verdict] = []
    programs = _runtime.registry().programs()
    with torch.cuda.device(device):
        for found, clock in _suites(arch, place, tiny, brief, only):
            new = verdicts_of(found, programs, arch, clock)
            verdicts += new
            for verdict in new:
                progress(verdict)
    return verdicts


def _suites(arch: str, device: torch.device, tiny: bool, brief: bool, only: str) -> Iterator[tuple[Problems, Seconds]]:
    """What each suite found, and its clock, when it is done and before the next one begins."""
    clock = Seconds()
    loads = _loads(tiny, brief)
    yield _gemm_problems(_programs(launch.OPERATOR, arch, only), loads, device, tiny, brief, clock=clock), clock
    for name in _programs(launch.SUMS, arch, only):
        clock = Seconds()
        yield {name: _sum_problems(arch, TINY_SUMS[brief:] if tiny else SUMS, device, tiny)}, clock
    slabs = TINY_SLABS[brief:] if tiny else SLABS
    for operator in (launch.CONTIGUOUS, launch.MASKED):
        clock, names = Seconds(), _programs(operator, arch, only)
        yield _grouped_problems(operator, names, slabs, device, tiny, brief, clock=clock), clock
    clock = Seconds()
    packers, unpackers = (_programs(operator, arch, only) for operator in PACKERS)
    yield _packer_problems(packers, unpackers, device), clock
    for operator in rows.OPERATORS:
        for name in _programs(operator, arch, only):
            clock = Seconds()
            yield {name: rows.row_problems(operator, device, tiny=tiny)}, clock


def _loads(tiny: bool, brief: bool) -> tuple[Load, ...]:
    if not tiny:
        return LOADS
    return TINY_LOADS[1:] if brief else (*TINY_LOADS, TINY_TALL)


def _programs(operator: str, arch: str, only: str) -> list[str]:
    if operator not in _runtime.registry().manifest.operators:
        return []
    return [name for name in _runtime.registry().programs(operator, arch) if matches(name, only)]


def _gemm_problems(
    programs: list[str],
    loads: tuple[Load, ...],
    device: torch.device,
    tiny: bool,
    brief: bool = False,
    *,
    clock: Seconds | None = None,
) -> Problems:
    """Problems by program and case. The programs take turns on each case, whose exact result is worked out once.

    brief: one routing a load, in turn.
    """
    found: Problems = {name: [] for name in programs}
    clock = clock or Seconds()
    routings = tuple(enumerate(TINY_ROUTINGS if tiny else ROUTINGS))
    for turn, load in enumerate(loads if programs else ()):
        for place, routing in routings[turn % len(routings) :][:1] if brief else routings:
            made_on, swiglu = torch.device("cpu") if tiny else device, load.shape.gated and place % 2 == 0
            case = gemm_case(*load, routing, made_on, weighted=place % 2 == 1 or swiglu, swiglu=swiglu)
            expected = Expected.of(case)
            case = placed(case, device)
            for name in programs:
                if not launch.serves(_runtime.operator("moe_w4a16").programs[name], load.shape):
                    continue
                with clock.of(name):
                    problems = list(gemm_problems(case, expected, name))
                found[name].append([f"{load} {routing}: {problem}" for problem in problems])
    return found


def _sum_problems(arch: str, loads: tuple[Load, ...], device: torch.device, tiny: bool) -> list[list[str]]:
    """By case, for the sums behind every GEMM program, as each may leave them other room; a tool looks at one alone."""
    found = []
    for load in loads:
        gemms = [
            name
            for name in _programs(launch.OPERATOR, arch, "*")
            if launch.serves(_runtime.operator(launch.OPERATOR).programs[name], load.shape)
        ]
        for routing in TINY_ROUTINGS if tiny else ("random", "hot", "one", "remote"):
            case = combine.combine_case(*load, routing, torch.device("cpu") if tiny else device)
            expected = combine.expected_of(case)
            case = combine.moved(case, device)
            for name in gemms[:1] if tiny else gemms:
                problems = combine.combine_problems(case, expected, name)
                found.append([f"{load} {routing}: {problem}" for problem in problems])
    return found


def _grouped_problems(
    operator: str,
    programs: list[str],
    loads: tuple[Slabs, ...],
    device: torch.device,
    tiny: bool,
    brief: bool = False,
    *,
    clock: Seconds | None = None,
) -> Problems:
    """The same for an operator whose rows are told in other ways: each way with each spread of rows over experts.

    brief: with the first spread alone.
    """
    found: Problems = {name: [] for name in programs}
    clock = clock or Seconds()
    forms = [form for form, taker in grouped.FORMS.items() if taker == operator]
    for load in loads if programs else ():
        spreads = TINY_SPREADS[: 1 if brief else None] if tiny else grouped.SPREADS
        for place, (spread, form) in enumerate(product(spreads, forms)):
            counts = grouped.draw_counts(spread, load.mean, load.shape.experts)
            made_on, swiglu = torch.device("cpu") if tiny else device, load.shape.gated and place % 2 == 0
            spare = 0 if spread == "full" else 5
            case = grouped.grouped_case(
                load.shape, form, counts, made_on, weighted=place % 3 == 1, swiglu=swiglu, spare_rows=spare
            )
            expected = grouped.expected_of(case)
            case = grouped.placed(case, device)
            for name in programs:
                if not launch.serves(_runtime.operator(operator).programs[name], load.shape):
                    continue
                with clock.of(name):
                    problems = list(grouped.grouped_problems(case, expected, name))
                found[name].append([f"{load} {spread} {form}: {problem}" for problem in problems])
    return found


def _packer_problems(packers: list[str], unpackers: list[str], device: torch.device) -> Problems:
    """The packers as they are routed, from words and from plain codes, against torch's own packing."""
    found: Problems = {name: [] for name in (*packers, *unpackers)}
    for shape in (load.shape for load in TINY_LOADS if found):
        words, scales = checkpoint(shape, torch.device("cpu"))
        want = layout.pack(words, scales, gated=shape.gated)
        plain = layout.codes_from_words(words).to(device, torch.int32)
        words, scales = words.to(device), scales.to(device)
        for name in packers:
            found[name] += [
                _differs(f"{shape} from {what}", pack_w4a16(codes, scales, gated=shape.gated).data, want)
                for what, codes in (("words", words), ("codes", plain))
            ]
        restored = unpack_w4a16(pack_w4a16(words, scales, gated=shape.gated))
        for name in unpackers:
            found[name] += [
                _differs(f"{shape} unpacked", *pair) for pair in zip(restored, (words, scales), strict=True)
            ]
    return found


def _differs(label: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    return [] if torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8)) else [f"{label}: bytes differ"]
