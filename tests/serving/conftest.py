"""vLLM's own code, made ready once. chord's stand-in for humming goes first, as the plugin would put it."""

from __future__ import annotations

import gc
import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/serving/" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own are its own


@pytest.fixture(scope="session", autouse=True)
def vllm() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from chord.integrations import humming

    assert humming.activate()
    import vllmhost

    vllmhost.start()
    from chord.integrations import vllm as plugin

    plugin.register()
    gc.freeze()  # torch.cuda.graph collects garbage before each capture, and would look through all of vLLM
