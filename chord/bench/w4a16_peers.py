"""Peers of the W4A16 GEMM, measured in the same run: Humming's and Marlin's kernels from a folder the user prepared.

No peer's code is part of this project. The folder holds `whl/humming_kernels-*.whl` unless humming is installed, and
`moe_C.so.xz` (vLLM's extension with Marlin's MoE kernel) with vLLM's `scalar_type.py`; it may say vLLM's release in
`VLLM_VERSION`. Weights are random: a peer packs them as it likes.
"""

from __future__ import annotations

import importlib.util
import lzma
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from chord.bench.peers import from_wheel
from chord.router import route_plan
from chord.w4a16.layout import CODES_PER_WORD, SCALE_GROUP, WeightShape

MARLIN_BLOCK_M = (8, 16, 32, 48, 64)
_SILU_TIMES = "a / (1.f + __expf(-a)) * b"


class Work(NamedTuple):
    """One measured call: x [M, K] bfloat16, ids [tokens, routes] of routed experts, and how pairs find their row."""

    shape: WeightShape
    x: torch.Tensor
    ids: torch.Tensor
    top_k: int

    @property
    def pairs(self) -> int:
        return self.ids.numel()


class Peer(Protocol):
    """A library; `calls` gives launches of the work by name, or raises when it does not serve it."""

    version: str

    def calls(self, work: Work) -> dict[str, Callable[[], object]]: ...


@runtime_checkable
class GroupedPeer(Peer, Protocol):
    """A library that takes sorted rows as well (kind "contiguous": work of one route a row), or slabs ("masked")."""

    def grouped_calls(self, work: Work, kind: str) -> dict[str, Callable[[], object]]: ...


@runtime_checkable
class SwigluPeer(Peer, Protocol):
    """A library that has an activation kernel, too."""

    def swiglu_calls(self, work: Work) -> dict[str, Callable[[], object]]: ...


class Humming:
    """humming-kernels: its indexed kernel, and its grouped ones, which are given rows that are in order already."""

    def __init__(self, folder: Path) -> None:
        from_wheel(folder, "humming", "humming_kernels")
        self.version = metadata.version("humming-kernels")
        self._layer_type = importlib.import_module("humming.layer").HummingLayer
        self.configure = importlib.import_module("humming.tune").get_heuristics_config
        self._process = importlib.import_module("humming.layer").HummingLayerMethod.may_process_input
        self._kept: tuple[WeightShape, Any] | None = None

    def calls(self, work: Work) -> dict[str, Callable[[], object]]:
        """humming_indexed and humming_contiguous."""
        layer = self._layer(work.shape)
        found = {}
        for kind, arguments in (("indexed", self._indexed), ("contiguous", self._contiguous)):
            gemm = "indexed" if kind == "indexed" else "grouped_contiguous"
            config = self.configure(layer.humming_config, shape_m=work.pairs, gemm_type=gemm)
            inputs, options = arguments(work, config)
            options |= {
                "outputs": torch.empty(work.pairs, work.shape.n, dtype=torch.bfloat16, device=work.x.device),
                "valid_shape_m": work.pairs,
                "compute_config": {"gemm_type": gemm},
                "tuning_config": config,
            }
            found[f"humming_{kind}"] = _bind(layer, inputs, options)
        return found

    def grouped_calls(self, work: Work, kind: str) -> dict[str, Callable[[], object]]:
        """humming_contiguous, or humming_masked on slabs of twice the rows that the fullest one holds, at least 64."""
        layer, gemm = self._layer(work.shape), f"grouped_{kind}"
        config = self.configure(layer.humming_config, shape_m=work.pairs, gemm_type=gemm)
        if kind == "contiguous":
            rows, options = self._contiguous(work, config)
        else:
            counts = torch.bincount(work.ids.reshape(-1).long(), minlength=work.shape.experts).to(torch.int32)
            size = work.shape.experts * max(2 * int(counts.max()), 64)
            rows = torch.randn(size, work.shape.k, device=work.x.device).to(torch.bfloat16)
            options = {"expert_layout": counts}
        options |= {
            "outputs": torch.empty(rows.shape[0], work.shape.n, dtype=torch.bfloat16, device=work.x.device),
            "valid_shape_m": work.pairs,
            "compute_config": {"gemm_type": gemm},
            "tuning_config": config,
        }
        return {f"humming_{kind}": _bind(layer, rows, options)}

    def swiglu_calls(self, work: Work) -> dict[str, Callable[[], object]]:
        """humming_two_kernels: the indexed GEMM, then the activation."""
        layer = self._layer(work.shape)
        config = self.configure(layer.humming_config, shape_m=work.pairs, gemm_type="indexed")
        inputs, options = self._indexed(work, config)
        out = torch.empty(work.pairs, work.shape.n, dtype=torch.bfloat16, device=work.x.device)
        active = torch.empty(work.pairs, work.shape.n // 2, dtype=torch.bfloat16, device=work.x.device)
        options |= {"outputs": out, "valid_shape_m": work.pairs, "compute_config": {"gemm_type": "indexed"}}

        def call() -> None:
            layer(inputs, **options, tuning_config=config)
            self.activate(layer, out, active)

        return {"humming_two_kernels": call}

    def activate(self, layer: Any, gate_up: torch.Tensor, out: torch.Tensor, **options: Any) -> None:  # noqa: ANN401
        """Writes silu(gate) * up, by a kernel of its own."""
        self._process(
            layer, gate_up, outputs=out, activation_type="binary_split", activation_impl=_SILU_TIMES, **options
        )

    def scatter(self, layer: Any, x: torch.Tensor, out: torch.Tensor, **options: Any) -> None:  # noqa: ANN401
        """Copies rows into the order of their experts, by a kernel of its own."""
        self._process(layer, x, outputs=out, layout="scatter", **options)

    def _indexed(self, work: Work, config: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        slots, experts, extent = exact_plan(work, config["block_shape"][0])
        return work.x, {
            "sorted_ids": slots, "expert_ids": experts, "num_tokens_padded": extent, "top_k": work.top_k
        }  # fmt: skip

    def _contiguous(self, work: Work, config: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        counts = torch.bincount(work.ids.reshape(-1).long(), minlength=work.shape.experts)
        offsets = torch.zeros(work.shape.experts + 1, dtype=torch.long, device=work.x.device)
        offsets[1:] = counts.cumsum(0)
        rows = torch.randn(work.pairs, work.shape.k, device=work.x.device).to(torch.bfloat16)
        return rows, {"expert_layout": offsets}

    def _layer(self, shape: WeightShape) -> Any:  # noqa: ANN401
        if self._kept is None or self._kept[0] != shape:
            self._kept = None
            words = _random_words(shape.experts, shape.n, shape.k // CODES_PER_WORD)
            self._kept = shape, self.layer(shape, words, _random_scales(shape.experts, shape.n, shape.k // SCALE_GROUP))
        return self._kept[1]

    def layer(self, shape: WeightShape, words: torch.Tensor, scales: torch.Tensor) -> Any:  # noqa: ANN401
        """A layer of its own of a checkpoint's words int32 [E, N, K / 8] and scales bfloat16 [E, N, K / 32]."""
        layer = self._layer_type(
            shape_n=shape.n,
            shape_k=shape.k,
            num_experts=shape.experts,
            weight_config={"dtype": "int4", "group_size": SCALE_GROUP},
            torch_dtype=torch.bfloat16,
        ).to("cuda")
        for name, given in (("weight", words), ("weight_scale", scales)):
            parameter = getattr(layer, name)
            if parameter.shape != given.shape:
                raise RuntimeError(f"humming's {name}: expected {list(given.shape)}, it has {list(parameter.shape)}")
            parameter.data = given.to(parameter.dtype)
        layer.transform()
        return layer


class Marlin:
    """vLLM's moe_wna16_marlin_gemm."""

    def __init__(self, folder: Path) -> None:
        self.version = f"vLLM {vllm_operators(folder)}"
        self._type = _module(folder / "scalar_type.py").scalar_types.uint4b8.id
        self._locks = torch.zeros(1024, dtype=torch.int32, device="cuda")
        self._kept: tuple[WeightShape, torch.Tensor, torch.Tensor] | None = None

    def calls(self, work: Work) -> dict[str, Callable[[], object]]:
        """marlin, at the block size that vLLM would choose."""
        shape = work.shape
        if self._kept is None or self._kept[0] != shape:
            self._kept = None
            words = _random_words(shape.experts, shape.k // 16, shape.n * 2)
            self._kept = shape, words, _random_scales(shape.experts, shape.k // SCALE_GROUP, shape.n)
        _, words, scales = self._kept
        block_m = marlin_block_m(work.pairs, shape.experts)
        slots, experts, extent = exact_plan(work, block_m)
        out = torch.empty(work.pairs, shape.n, dtype=torch.bfloat16, device=work.x.device)
        weights = torch.rand(work.pairs, device=work.x.device)
        gemm, locks, kind = torch.ops._moe_C.moe_wna16_marlin_gemm, self._locks, self._type
        rows = work.x.shape[0]

        def call() -> None:
            gemm(
                work.x, out, words, None, scales, None, None, None, locks, slots, experts, extent, weights, block_m,
                work.top_k, False, kind, rows, shape.n, shape.k, False, True, False, -1, -1, -1,
            )  # fmt: skip

        return {"marlin": call}


PEERS: dict[str, Callable[[Path], Peer]] = {"humming": Humming, "marlin": Marlin}


@lru_cache(maxsize=4)
def vllm_operators(folder: Path) -> str:
    """Makes torch.ops._moe_C of the folder's moe_C.so.xz, once in a process; vLLM's release as the folder says it."""
    library = Path(tempfile.mkdtemp(prefix="chord-peers-")) / "moe_C.so"
    library.write_bytes(lzma.decompress((folder / "moe_C.so.xz").read_bytes()))
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    note = folder / "VLLM_VERSION"
    return note.read_text(encoding="utf-8").strip() if note.is_file() else "unknown"


def marlin_block_m(pairs: int, experts: int) -> int:
    """The smallest block that nearly holds an expert's rows, as vLLM chooses it."""
    return next((size for size in MARLIN_BLOCK_M if pairs / experts / size < 0.9), MARLIN_BLOCK_M[-1])


def exact_plan(work: Work, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, expert ids, padded length) of the work's routing, cut to what is used."""
    plan = route_plan(work.ids, work.shape.experts, block_m)
    count = int(plan.num_tokens_post_padded)
    return plan.sorted_token_ids[:count], plan.expert_ids[: count // block_m], plan.num_tokens_post_padded


def _bind(layer: Any, inputs: torch.Tensor, options: dict[str, Any]) -> Callable[[], object]:  # noqa: ANN401
    return lambda: layer(inputs, **options)


def _random_words(*size: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, size, dtype=torch.int32, device="cuda")


def _random_scales(*size: int) -> torch.Tensor:
    return (torch.rand(size, device="cuda") * 0.01 + 0.001).to(torch.bfloat16)


def _module(path: Path) -> Any:  # noqa: ANN401
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"expected a Python file at {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
