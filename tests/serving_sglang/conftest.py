"""SGLang's own code, made ready once."""

from __future__ import annotations

import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/serving_sglang/" in str(item.path):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.filterwarnings("default"))  # SGLang's own are its own


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    import sglanghost

    sglanghost.start()
    from chord.integrations import sglang as plugin

    plugin.register()
    plugin.register()
    gc.freeze()  # torch.cuda.graph collects garbage before each capture, and would look through all of SGLang
