"""Fixtures of the tests that run kernels. Whether they run at all is decided in tests/conftest.py."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

_SHOWN = 15
_HANG_SECONDS = 240  # far above the slowest test: a kernel that waits for ever ends the run with a traceback


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default"))  # torch's own warnings are not ours to forbid


@pytest.fixture(scope="session", autouse=True)
def _quick_captures():
    """torch.cuda.graph collects garbage before each capture, and would look through all of torch."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _end_hangs():
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def device() -> torch.device:
    torch.set_num_threads(1)  # what is judged on the host is small; more threads wait for each other, and for others'
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def expect_none():
    """Fails with the first problems of many, and how many there are."""

    def check(problems: Iterable[str]) -> None:
        found = list(problems)
        shown = "\n".join(found[:_SHOWN])
        assert not found, f"{len(found)} problems, the first ones:\n{shown}"

    return check
