"""SGLang's own MoE code in a bare environment: its published package without its servers' needs.

`start()` must run before anything imports sglang. What is absent and not needed is left empty; configuration, the
layer with its constructor, weight loader and forward, and the dispatcher are SGLang's, unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from chord.bench.vllm_layers import Rank, Routed, Weights, quantization_config
from leftout import LeaveOut

NAME = "model.layers.1.mlp.experts"

LEFT_OUT = ("constrained", "entrypoints", "managers", "multimodal", "parser")
"""Parts of sglang.srt that routed experts do not touch, but that its imports reach."""
CONFIGS = (
    "__init__",
    "linear_attn_model_registry",
    "load_config",
    "mamba_utils",
    "model_config",
    "update_config",
    "utils",
)
"""Models' configurations that are imported; the others are left out."""
OPTIONAL = (
    "IPython", "dill", "fastapi", "flashinfer", "gguf", "loguru", "nvidia", "openai_harmony", "orjson",
    "partial_json_parser", "pybase64", "python_multipart", "quack", "setproctitle", "sgl_kernel", "starlette",
    "torch_memory_saver", "triton", "tvm_ffi", "uvicorn", "uvloop", "xgrammar", "zmq",
)  # fmt: skip
"""Packages that may be absent: of servers, and compiled kernels of other backends."""


class _Empty(type):
    """A class whose attributes are such classes, that can be called, indexed, joined and walked through."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Empty(name, (), {})
        setattr(cls, name, value)
        return value

    def __getitem__(cls, _: object) -> object:
        return cls

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __call__(cls, *given: object, **named: object) -> object:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else cls

    def __or__(cls, _: object) -> object:
        return cls

    __ror__ = __or__


class _Anything(types.ModuleType):
    __path__: Sequence[str] = []
    __version__ = "3.6.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Empty(name, (), {})
        setattr(self, name, value)
        return value


def start() -> None:
    """Makes SGLang's MoE code importable here. Once per process."""
    if any(isinstance(finder, LeaveOut) for finder in sys.meta_path):
        return
    import torch._inductor.compile_fx  # before triton is left out: torch looks into it

    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    configs = sorted(path.stem for path in (Path(spec.origin).parent / "srt" / "configs").glob("*.py"))
    left_out = [f"sglang.srt.{name}" for name in LEFT_OUT]
    left_out += [f"sglang.srt.configs.{name}" for name in configs if name not in CONFIGS]
    sys.meta_path.insert(0, LeaveOut(left_out, _Anything))
    sys.meta_path.append(LeaveOut(OPTIONAL, _Anything))
    import sglang.srt.layers.moe.fused_moe_triton  # noqa: F401
    from sglang.srt.layers.moe.token_dispatcher import standard

    if not torch.cuda.is_available():
        standard.get_device = lambda: "cpu"  # SGLang's own refuses a machine without an accelerator


def layer(
    *,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tp: Rank = (0, 1),
    ep: Rank = (0, 1),
    dtype: torch.dtype = torch.bfloat16,
    server: Mapping[str, object] | None = None,
    **changes: object,
) -> torch.nn.Module:
    """One rank's FusedMoE of SGLang, made by its constructor, under --quantization chord; waits for its checkpoint.

    Ranks come from SGLang's scoped overrides, since there are no process groups. server: settings as resolved from the
    command line. changes: further arguments.
    """
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.server_args import ServerArgs

    size, context = max(tp[1], ep[1]), runtime_context.get_context()
    context.set_server_args(ServerArgs(model_path="dummy", tp_size=size, ep_size=ep[1]))
    context.override("test", **(server or {}))
    config = get_quantization_config("chord").from_config(quantization_config())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device, runtime_context.get_parallel().override(moe_tp_rank=tp[0], moe_ep_rank=ep[0], tp_group=None):
        return FusedMoE(
            num_experts=experts, hidden_size=hidden, intermediate_size=intermediate, layer_id=1, top_k=top_k,
            params_dtype=dtype, quant_config=config, prefix=NAME, **changes,
        )  # fmt: skip


def load(made: torch.nn.Module, seed: int, *, experts: int, hidden: int, intermediate: int, **_: object) -> Weights:
    """A random checkpoint of the whole layer through SGLang's loader; a copy of what the rank kept of it."""
    random = torch.Generator(made.w13_weight_packed.device).manual_seed(seed)
    for expert in range(experts):
        for shard, n, k in (("w1", intermediate, hidden), ("w3", intermediate, hidden), ("w2", hidden, intermediate)):
            send(made, expert, shard, *checkpoint(n, k, random))
    return kept(made)


def checkpoint(n: int, k: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes int32 [N, K / 8] and scales bfloat16 [N, K / 32] of one expert's projection."""
    words = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=random, device=random.device).to(torch.int32)
    scale = torch.rand(n, k // 32, generator=random, device=random.device) * 0.01 + 0.001
    return words, scale.to(torch.bfloat16)


def send(made: torch.nn.Module, expert: int, shard: str, words: torch.Tensor, scale: torch.Tensor) -> None:
    """One expert's projection of a checkpoint, as a model's loader hands it to the layer's."""
    stem = "w2" if shard == "w2" else "w13"
    shape = torch.tensor([words.shape[0], words.shape[1] * 8])
    for suffix, tensor in (("packed", words), ("scale", scale), ("shape", shape)):
        name = f"{stem}_weight_{suffix}"
        parameter = getattr(made, name)
        parameter.weight_loader(parameter, tensor, f"experts.{name}", shard_id=shard, expert_id=expert)


def kept(made: torch.nn.Module) -> Weights:
    """A copy of what was loaded and not packed yet."""
    names = (f"{stem}_weight_{suffix}" for stem in ("w13", "w2") for suffix in ("packed", "scale"))
    return Weights(*(getattr(made, name).clone() for name in names))


def routed(tokens: int, random: torch.Generator, *, experts: int, top_k: int, hidden: int, **_: object) -> Routed:
    """Random tokens on distinct experts of all ranks."""
    x = torch.randn(tokens, hidden, generator=random, device=random.device).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, generator=random, device=random.device).topk(top_k)
    return Routed(x, chosen.values / top_k, chosen.indices.to(torch.int32))


def local_experts(experts: int, ep: Rank, device: torch.device) -> torch.Tensor:
    """int32 [experts]: the id of each on its rank, -1 for those of other ranks."""
    rank, size = ep
    ids = torch.arange(experts, device=device, dtype=torch.int32) - rank * experts // size
    return torch.where((ids >= 0) & (ids < experts // size), ids, -1)


def topk_output(given: Routed) -> object:
    """The routes as SGLang's router hands them on."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(given.weights, given.ids, torch.empty(0))


def forward(made: torch.nn.Module, given: Routed) -> torch.Tensor:
    """SGLang's forward of the layer on given routes: dispatch, experts, combination."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_group=None):
        found: torch.Tensor = made(given.x, topk_output(given))
    return found
