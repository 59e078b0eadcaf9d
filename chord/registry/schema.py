"""The manifest's types, schema version 1. Parsed once, frozen, strict: an unknown field or a wrong type is an error.

Sizes end in `_bytes`. Every hash is 64 lower-case hex digits. Dictionaries are written with sorted keys (canonical.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

SCHEMA_VERSION = 1

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]  # `$` alone lets a newline follow
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
CubinSize = Annotated[int, msgspec.Meta(ge=1, le=64 << 20)]  # bytes; the largest so far has 0.2 MB
Constant = int | str


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RegistryInfo(_Strict, frozen=True, kw_only=True):
    version: str
    serial: Positive


class Toolchain(_Strict, frozen=True, kw_only=True):
    compiler: Literal["nvrtc"]
    version: str
    options: dict[str, tuple[str, ...]]
    """Compile options per architecture, complete and in order."""


class Axis(_Strict, frozen=True, kw_only=True):
    """One dimension of an operator's domain.

    Either `choices` is given: `keys` are chosen together, each row of `choices` holds one value per key
    (num_experts, top_k).
    Or `first`, `last`, `step` are given: the single key takes every multiple step from first to last, both included.
    """

    keys: tuple[str, ...]
    choices: tuple[tuple[Constant, ...], ...] = ()
    first: int = 0
    last: int = -1
    step: Positive = 1


class Arg(_Strict, frozen=True, kw_only=True):
    """One kernel argument.

    `type` is a C scalar for parameters (i32, i64, f32), the element type for buffers (f32, i32, u8, any).
    """

    kind: Literal["buffer", "parameter", "tensor_map", "grid"]
    name: str
    type: str


class GridRule(_Strict, frozen=True, kw_only=True):
    """grid.x = clamp(ceil(param / per), 1, max), a multiple of the cluster; `blocks` instead of `param` if constant.

    max_per_sm bounds it by that many blocks an SM; co_resident bounds it by what the driver says can be resident at
    once (blocks, or clusters when the kernel has a cluster), which a grid-wide join needs. A device that holds fewer
    than min_resident blocks cannot run the kernel at all: its blocks would get more work than they have room for.
    """

    blocks: Count = 0
    param: str | None = None
    per: Positive = 1
    max: Positive | None = None
    max_per_sm: Positive | None = None
    co_resident: bool = False
    min_resident: Positive = 1


class KernelConfig(_Strict, frozen=True, kw_only=True):
    """One launch of a program. A program's kernels are launched in order on one stream."""

    symbol: str
    block: tuple[Positive, Positive, Positive]
    cluster: Positive
    """CTAs in a cluster along x; 1: no cluster attribute is set. Above 8 the non-portable attribute is set."""
    dynamic_smem_bytes: Count
    grid: GridRule
    cooperative: bool
    dependent: bool
    """Launched with programmatic stream serialization: may start before the previous kernel on the stream has ended."""


class Workspace(_Strict, frozen=True, kw_only=True):
    """Scratch memory outside the user's ABI: bytes + bytes_per_token * num_tokens; zeroed once if `zeroed`."""

    bytes: Count
    bytes_per_token: Count
    zeroed: bool


class Arm(_Strict, frozen=True, kw_only=True):
    template: str
    args: tuple[Arg, ...]
    summary: str


class KernelResources(_Strict, frozen=True, kw_only=True):
    registers: Count
    spill_bytes: Count
    static_smem_bytes: Count


class Build(_Strict, frozen=True, kw_only=True):
    """What one program became on one architecture. `kernels` is in the order of the program's kernels."""

    closure_sha256: Sha256
    cubin_sha256: Sha256
    size_bytes: CubinSize
    min_driver: Positive
    """Least CUDA driver API version as cuDriverGetVersion reports it, for example 12000."""
    kernels: tuple[KernelResources, ...]


class Program(_Strict, frozen=True, kw_only=True):
    arm: str
    constants: dict[str, Constant]
    """Everything the template was given; num_tokens and block_m are absent when the program serves any."""
    num_tokens: Count | None
    block_m: Positive | None
    flags: tuple[str, ...]
    kernels: tuple[KernelConfig, ...]
    workspace: Workspace
    architectures: tuple[str, ...]
    builds: dict[str, Build]
    """Keyed by architecture; exactly the declared `architectures`."""

    def limit(self, key: str) -> int | None:
        """The largest value of a range key that the program serves; None when it has no limit.

        It is the constant `max_tokens` for num_tokens, `max_pairs` for num_pairs.
        """
        limit = self.constants.get("max_" + key.removeprefix("num_"))
        return limit if isinstance(limit, int) else None


class Route(_Strict, frozen=True, kw_only=True):
    """A box of the domain and its program. Exact values for choice axes, [first, last] for range axes."""

    where: dict[str, Constant | tuple[int, int]]
    program: str


class Operator(_Strict, frozen=True, kw_only=True):
    abi_version: Positive
    axes: tuple[Axis, ...]
    arms: dict[str, Arm]
    programs: dict[str, Program]
    routes: dict[str, tuple[Route, ...]]
    """Keyed by architecture; each list covers the domain without gap or overlap."""
    notes: dict[str, str]
    """Keyed by architecture: how its routes came about (measured on which GPU, or reasoned)."""


class Manifest(_Strict, frozen=True, kw_only=True):
    schema_version: int
    registry: RegistryInfo
    toolchain: Toolchain
    sources: dict[str, Sha256]
    """SHA-256 of every template and header, by path under templates/."""
    operators: dict[str, Operator]
