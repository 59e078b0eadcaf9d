from __future__ import annotations

import pytest
from unit.registry import samples
from unit.registry.fakes import FakeApi

from chord import _settings
from chord.registry.store import Store


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in _settings.KNOWN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def api():
    return FakeApi()


@pytest.fixture
def root(tmp_path):
    """A published registry with real cubins for sm_90a and sm_100a."""
    return samples.publish(tmp_path, samples.built_manifest(Store(tmp_path / "cubins")))


@pytest.fixture
def registry(root, api):
    return samples.opened(root, api)
