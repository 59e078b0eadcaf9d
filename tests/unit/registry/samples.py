"""A whole registry made in memory: one toy operator whose cubins are really compiled with the pinned NVRTC."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from chord._version import __version__
from chord.errors import ToolchainError
from chord.registry import Registry, canonical
from chord.registry import schema as s
from chord.registry.cubin import parse
from chord.registry.driver import Driver
from chord.registry.loading import Loader
from chord.registry.store import Store

ARCHS = ("sm_90a", "sm_100a")
ZERO = "0" * 64
AXES = (
    s.Axis(keys=("width", "ways"), choices=((896, 16), (384, 8))),
    s.Axis(keys=("num_tokens",), first=0, last=1000),
    s.Axis(keys=("block_m",), first=8, last=64, step=8),
)
ARGS = (
    s.Arg(kind="buffer", name="x", type="f32"),
    s.Arg(kind="buffer", name="map", type="i32"),
    s.Arg(kind="parameter", name="num_tokens", type="i32"),
    s.Arg(kind="parameter", name="factor", type="f32"),
    s.Arg(kind="parameter", name="total", type="i64"),
)
SIGNATURE = "(float* x, const int* map, int num_tokens, float factor, long long total)"


@cache
def _compiler():
    from chord.build import toolchain
    from chord.build.nvrtc import Nvrtc
    from chord.build.tree import Tree

    pin = toolchain.load(Tree.default().toolchain)
    return pin, Nvrtc.open(pin)


@cache
def compiled(source: str, arch: str) -> bytes:
    """A cubin of CUDA source. Skips where the pinned compiler is not installed."""
    try:
        pin, nvrtc = _compiler()
    except ToolchainError as error:
        pytest.skip(f"needs the pinned NVRTC: {error}")
    from chord.build.nvrtc import Request

    options = tuple(f"--gpu-architecture={arch}" if "architecture" in o else o for o in pin.options("sm_90a"))
    result = nvrtc.compile(Request(name="toy.cu", source=source, headers={}, options=options))
    assert result.cubin is not None, result.log
    return result.cubin


def kernel_source(*symbols: str, body: str = "x[map[0]] = factor * num_tokens + total;") -> str:
    return "\n".join(f'extern "C" __global__ void {symbol}{SIGNATURE} {{ {body} }}' for symbol in symbols)


def kernel(symbol: str, **changes) -> s.KernelConfig:
    fields = {
        "symbol": symbol,
        "block": (128, 1, 1),
        "cluster": 1,
        "dynamic_smem_bytes": 0,
        "grid": s.GridRule(param="num_tokens"),
        "cooperative": False,
        "dependent": False,
    }
    return s.KernelConfig(**(fields | changes))


def program(arm: str, kernels, archs=ARCHS, cubins=None, constants=None) -> s.Program:
    """`cubins` is by architecture; without one the program has builds that no store holds."""
    constants = constants or {}
    return s.Program(
        arm=arm,
        constants=constants,
        num_tokens=constants.get("num_tokens"),
        block_m=constants.get("block_m"),
        flags=(),
        kernels=tuple(kernels),
        workspace=s.Workspace(bytes=64, bytes_per_token=4, zeroed=True),
        architectures=archs,
        builds={arch: _build(kernels, (cubins or {}).get(arch)) for arch in archs},
    )


def _build(kernels, data: bytes | None) -> s.Build:
    info = parse(data).kernels if data else {}
    return s.Build(
        closure_sha256=ZERO,
        cubin_sha256=canonical.digest(data) if data else ZERO,
        size_bytes=len(data) if data else 1,
        min_driver=12080,
        kernels=tuple(
            s.KernelResources(
                registers=info[k.symbol].registers if k.symbol in info else 0,
                spill_bytes=0,
                static_smem_bytes=0,
            )
            for k in kernels
        ),
    )


def route(width: int, tokens, program: str, block_m=(8, 64)) -> s.Route:
    ways = dict(AXES[0].choices)[width]
    return s.Route(where={"width": width, "ways": ways, "num_tokens": tokens, "block_m": block_m}, program=program)


def manifest(programs: dict[str, s.Program], routes, version: str = __version__, archs=ARCHS) -> s.Manifest:
    arms = {p.arm: s.Arm(template="toy/toy.cu.j2", args=ARGS, summary="a toy") for p in programs.values()}
    toy = s.Operator(
        abi_version=1, axes=AXES, arms=arms, programs=programs, routes=dict.fromkeys(archs, tuple(routes)), notes={}
    )
    return s.Manifest(
        schema_version=1,
        registry=s.RegistryInfo(version=version, serial=1),
        toolchain=s.Toolchain(compiler="nvrtc", version="12.9.86", options=dict.fromkeys((*ARCHS, "sm_103a"), ())),
        sources={},
        operators={"toy": toy},
    )


def plain_manifest(**changes) -> s.Manifest:
    """A valid manifest that needs no compiler: its cubins do not exist."""
    programs = {"toy.one.t1": program("one", [kernel("toy_one_t1")], constants={"num_tokens": 1})}
    programs["toy.many"] = program("many", [kernel("toy_many")])
    routes = [
        route(896, (0, 0), "toy.many"),
        route(896, (1, 1), "toy.one.t1"),
        route(896, (2, 1000), "toy.many", (8, 8)),
        route(896, (2, 1000), "toy.many", (16, 64)),
        route(384, (0, 1000), "toy.many"),
    ]
    return manifest(programs, routes, **changes)


def built_manifest(store: Store, archs=ARCHS) -> s.Manifest:
    """`toy.one.t1` (a cluster of 16), `toy.many` (plain), `toy.pair` (two kernels, a co-resident grid), in a store."""
    kernels = {
        "toy.one.t1": [kernel("toy_one_t1", cluster=16, dynamic_smem_bytes=200_000, grid=s.GridRule(blocks=16))],
        "toy.many": [kernel("toy_many", grid=s.GridRule(param="num_tokens", per=4, max=100))],
        "toy.pair": [
            kernel("toy_pair", grid=s.GridRule(param="num_tokens", max_per_sm=1, co_resident=True), cooperative=True),
            kernel("toy_pair_plan", grid=s.GridRule(blocks=1), dependent=True),
        ],
    }
    programs = {}
    for name, found in kernels.items():
        cubins = {arch: compiled(kernel_source(*(k.symbol for k in found)), arch) for arch in archs}
        for data in cubins.values():
            store.write(data)
        constants = {"num_tokens": 1} if name == "toy.one.t1" else {}
        programs[name] = program(name.split(".")[1], found, archs, cubins, constants)
    routes = [
        route(896, (0, 0), "toy.many"),
        route(896, (1, 1), "toy.one.t1"),
        route(896, (2, 1000), "toy.many"),
        route(384, (0, 1000), "toy.pair"),
    ]
    return manifest(programs, routes, archs=archs)


def publish(root: Path, made: s.Manifest) -> Path:
    (root / "manifest.json").write_bytes(canonical.encode(made))
    return root


def opened(root: Path, api: object) -> Registry:
    """The registry in `root` over a fake driver."""
    found = Registry.open(root)
    loader = Loader(Driver(api))
    return Registry(
        found.manifest, found.store, root=found.root, source=found.source, digest=found.digest, loader=loader
    )
