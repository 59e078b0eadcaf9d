"""What the cases share: the committed registry in a folder of its own, and where operators run."""

from __future__ import annotations

from pathlib import Path

import pytest
from load.hammer import copy_registry

from chord import _settings
from chord.registry import Registry


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # torch's own warnings are not ours to forbid


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in _settings.KNOWN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root(tmp_path):
    """A copy of the committed registry, whose files can be damaged."""
    store = Registry.open(relock=True).store
    if not store.listing():
        pytest.skip(f"needs the built cubins: chord build fills {store.root}")
    folder = tmp_path / "registry"
    folder.mkdir()
    return copy_registry(folder)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where an operator runs: the plain reference, or the kernels."""
    import torch

    torch.set_num_threads(1)  # the cases are small: more threads wait for each other
    return torch.device("cpu") if request.param == "cpu" else torch.device("cuda", torch.cuda.current_device())
