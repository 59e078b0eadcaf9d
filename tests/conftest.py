"""What tests need: the one place where tests are left out, always with the cause."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_NEED_TORCH = ["unit/integrations/*", "unit/router/*", "unit/w4a16/*", "gpu/*"]

_SERVING = {"vllm": "serving/*", "sglang": "serving_sglang/*"}
"""Frameworks that are tried where they are installed: scripts/test_vllm.sh and scripts/test_sglang.sh do that."""

collect_ignore_glob = [] if _HAS_TORCH else [*_NEED_TORCH]
collect_ignore_glob += [
    tests for host, tests in _SERVING.items() if not _HAS_TORCH or not importlib.util.find_spec(host)
]


@cache
def _why_not(count: int) -> str:
    """Empty when kernels can run on `count` GPUs here, else what is missing. Whatever is unexpected is an error."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "torch finds no CUDA device" if built else f"this torch ({torch.__version__}) is built without CUDA"
    from chord.registry.architectures import BY_CAPABILITY

    if torch.cuda.get_device_capability() not in BY_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is no GPU that chord has kernels for"
    found = torch.cuda.device_count()
    return "" if found >= count else f"expected {count} devices, torch finds {found}"


def pytest_report_header() -> list[str]:
    return [] if _HAS_TORCH else [f"torch is not installed: {', '.join(_NEED_TORCH)} are left out"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("gpu"):  # gpu(count=2) needs two of them
            cause = _why_not(mark.kwargs.get("count", 1))
            if cause:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {cause}"))
