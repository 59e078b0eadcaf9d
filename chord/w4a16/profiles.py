"""Names for the ways in which a W4A16 layer is deployed. One layout and one table of routes serve all of them: a
profile says what a layer is for, it chooses no kernel.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from chord import _settings
from chord.router.validate import check_int
from chord.w4a16.layout import WeightShape

Role = Literal["prefill", "decode", "mix"]
Split = Literal["ep", "tp"]
TP_SIZE = 8
"""The tensor-parallel size that has a profile."""


class Profile(NamedTuple):
    """`split` "ep": whole experts, a share of them on each GPU; "tp": a share of every expert on each GPU."""

    name: str
    archs: tuple[str, ...]
    role: Role
    split: Split


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("h200_prefill_ep8", ("sm_90a",), "prefill", "ep"),
        Profile("h200_decode_ep8", ("sm_90a",), "decode", "ep"),
        Profile("h200_tp8", ("sm_90a",), "mix", "tp"),
        Profile("h200_grouped_prefill", ("sm_90a",), "prefill", "ep"),
        Profile("h200_grouped_decode", ("sm_90a",), "decode", "ep"),
        Profile("blackwell_decode_ep8", ("sm_100a", "sm_103a"), "decode", "ep"),
    )
}
KIMI_SPLITS: dict[tuple[int, int], Split] = {
    (4096, 7168): "ep",
    (7168, 2048): "ep",
    (512, 7168): "tp",
    (7168, 256): "tp",
}
"""Kimi K2's projections (n, k) as its usual splits leave them on one GPU."""


def select_profile(
    shape: WeightShape,
    arch: str | None,
    *,
    profile: str = "auto",
    role: Role | None = None,
    tensor_parallel_size: int | None = None,
    settings: _settings.Settings | None = None,
) -> Profile:
    """The profile of a layer with projections of `shape` on an architecture (None on a CPU: taken for Hopper's).

    profile: a name of PROFILES, or "auto". role: prefill or decode; without it CHORD_SM90_DECODE says, else prefill.
    TP8 shards and Blackwell have one profile for both. tensor_parallel_size: where the shape does not tell. Raises
    ValueError for what is unknown or contradicts itself.
    """
    check_names(profile, role)
    if tensor_parallel_size is not None:
        check_int("tensor_parallel_size", tensor_parallel_size)
    if profile != "auto":
        return _agreed(_named(profile, arch), role, tensor_parallel_size)
    split = _split(shape, tensor_parallel_size)
    here = arch or "sm_90a"
    chosen = settings or _settings.read()
    if split == "tp":
        if chosen.use_grouped:
            raise ValueError("CHORD_USE_GROUPED=1: expected experts that are not split (EP), got a TP8 shard")
        return _named("h200_tp8", here)
    if here != "sm_90a":
        return _named("blackwell_decode_ep8", here)
    if role is None:
        role = "decode" if chosen.sm90_decode else "prefill"
    if role == "mix":
        raise ValueError("role: 'mix' is that of TP8 shards; expected prefill or decode")
    return PROFILES[f"h200_grouped_{role}" if chosen.use_grouped else f"h200_{role}_ep8"]


def check_names(profile: object, role: object) -> None:
    """Raises ValueError for a profile or a role that does not exist, whatever the weights."""
    if role not in (None, *get_args(Role)):
        raise ValueError(f"role: expected one of {', '.join(get_args(Role))}, got {role!r}")
    if profile not in ("auto", *PROFILES):
        raise ValueError(f"profile: expected auto or one of {', '.join(PROFILES)}, got {profile!r}")


def _named(name: str, arch: str | None) -> Profile:
    found = PROFILES[name]
    if arch is not None and arch not in found.archs:
        raise ValueError(f"profile: {name} is for {' and '.join(found.archs)}, the weights are on {arch}")
    return found


def _agreed(found: Profile, role: Role | None, tensor_parallel_size: int | None) -> Profile:
    """A profile that was named, if what else was said does not contradict it."""
    if role is not None and found.role not in (role, "mix"):
        raise ValueError(
            f"role: {role!r} contradicts the profile {found.name}, which is for {found.role}; leave one out"
        )
    if tensor_parallel_size not in (None, 1) and found.split == "ep":
        raise ValueError(
            f"tensor_parallel_size: {tensor_parallel_size} contradicts the profile {found.name}, which is for experts "
            "that are not split; leave one out"
        )
    return found


def _split(shape: WeightShape, tensor_parallel_size: int | None) -> Split:
    """From the stated size, else from a published shape, else whole experts."""
    known = KIMI_SPLITS.get((shape.n, shape.k))
    if tensor_parallel_size is None:
        return known or "ep"
    if tensor_parallel_size not in (1, TP_SIZE):
        raise ValueError(f"tensor_parallel_size: expected 1 or {TP_SIZE}, got {tensor_parallel_size}")
    stated: Split = "tp" if tensor_parallel_size == TP_SIZE else "ep"
    if known not in (None, stated):
        raise ValueError(
            f"tensor_parallel_size: {tensor_parallel_size} contradicts the projection {shape.n} x {shape.k}, which is "
            f"a shard of Kimi K2 as {'TP8' if known == 'tp' else 'EP'} leaves it"
        )
    return stated
