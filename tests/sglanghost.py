"""SGLang's own MoE code in a bare environment without a GPU: its published package without its servers' needs.

`start()` must run before anything imports sglang. What is absent and not needed is left empty; configuration, the
layer's weight loader, and the types of dispatch and combination are SGLang's, unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from leftout import LeaveOut

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
    "flashinfer", "gguf", "nvidia", "quack", "sgl_kernel", "torch_memory_saver", "triton", "tvm_ffi", "xgrammar",
)  # fmt: skip
"""Packages that may be absent."""


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
    import torch._inductor.compile_fx  # noqa: F401 - before triton is left out: torch looks into it

    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    configs = sorted(path.stem for path in (Path(spec.origin).parent / "srt" / "configs").glob("*.py"))
    left_out = [f"sglang.srt.{name}" for name in LEFT_OUT]
    left_out += [f"sglang.srt.configs.{name}" for name in configs if name not in CONFIGS]
    sys.meta_path.insert(0, LeaveOut(left_out, _Anything))
    sys.meta_path.append(LeaveOut(OPTIONAL, _Anything))
    import sglang.srt.layers.moe.fused_moe_triton  # noqa: F401
