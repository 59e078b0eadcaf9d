"""The checkpoint that examples/kimi_checkpoint.py writes, for the tests that load it by a framework's own loader."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch


class Example(NamedTuple):
    """prefix: of its layer's names. quantization: its config. sizes: of the layer. tensors: by their whole names."""

    prefix: str
    quantization: dict[str, Any]
    sizes: dict[str, int]
    tensors: dict[str, torch.Tensor]


def written(folder: Path) -> Example:
    """Runs the example and reads what it wrote. Skips without safetensors."""
    pytest.importorskip("safetensors", reason="checkpoints need safetensors")
    from safetensors.torch import load_file

    example = runpy.run_path(str(Path(__file__).parents[1] / "examples/kimi_checkpoint.py"))
    example["write"](folder)
    sizes = {name: example[name.upper()] for name in ("experts", "top_k", "hidden", "intermediate")}
    tensors = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}
    return Example(example["PREFIX"], example["QUANTIZATION"], sizes, tensors)
