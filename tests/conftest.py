"""What tests need: the one place where tests are left out, always with the cause."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import pytest

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_NEED_TORCH = ["unit/router/*", "gpu/*"]

collect_ignore_glob = [] if _HAS_TORCH else _NEED_TORCH


@lru_cache(maxsize=1)
def _why_no_gpu() -> str:
    """Empty when kernels can run here; otherwise what is missing. Anything unexpected is an error, not a skip."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "torch finds no CUDA device" if built else f"this torch ({torch.__version__}) is built without CUDA"
    from chord.registry.architectures import BY_CAPABILITY

    if torch.cuda.get_device_capability() not in BY_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is no GPU that chord has kernels for"
    return ""


def pytest_report_header() -> list[str]:
    return [] if _HAS_TORCH else [f"torch is not installed: {', '.join(_NEED_TORCH)} are left out"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    cause = _why_no_gpu() if marked else ""
    for item in marked if cause else []:
        item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {cause}"))
