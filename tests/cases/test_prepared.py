"""Every prepared class beside the bare driver calls that it stands for, on a driver that runs nothing."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("torch", reason="the operators need torch")

import torch
from cases.operators import PREPARED_CASES
from unit.registry.fakes import FakeApi

from chord import _runtime
from chord.bench.host import bare_launch, launch_times
from chord.registry import Registry
from chord.registry.driver import Driver
from chord.registry.launch import PreparedLaunch
from chord.registry.loading import Loader
from chord.router import launch as router_launch
from chord.router import workspaces
from chord.w4a16 import launch


class Gpu:
    """What the operators take for the current GPU: the host's memory, and launches that are only written down."""

    def __init__(self):
        self.stream, self.api = 7, FakeApi()

    def launched(self, call):
        """(function, stream, parameters, blocks) of each kernel of a call."""
        self.api.launches.clear()
        call()
        return [(made["function"], made["stream"], made["params"], made["grid"]) for made in self.api.launches]


@pytest.fixture
def gpu(root, monkeypatch):
    gpu, registry = Gpu(), Registry.open(root)
    registry._loader = Loader(Driver(gpu.api))
    load = Registry.load
    monkeypatch.setattr(_runtime, "registry", lambda: registry)
    monkeypatch.setattr(_runtime, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(Registry, "load", lambda self, name, device=None: load(self, name, device=0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: gpu.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(workspaces, "new", lambda device, size, zeroed: torch.zeros(size, dtype=torch.uint8))
    caches = launch._gemm_kernel, launch._named_kernel, launch._row_mover, router_launch._bound
    for cache in caches:
        cache.cache_clear()
    yield gpu
    for cache in caches:
        cache.cache_clear()


CLEARING = [c for c in PREPARED_CASES if "zero_missing" in inspect.signature(c.prepare).parameters]
FORMS = [(case, clear) for clear, cases in ((False, PREPARED_CASES), (True, CLEARING)) for case in cases]


@pytest.mark.parametrize(("case", "clear"), FORMS, ids=lambda value: getattr(value, "name", "clears" * bool(value)))
def test_a_prepared_launch_is_its_driver_calls_on_the_current_stream(case, clear, gpu):
    """One launch object whatever the operator; what clears its output first does that in the bare call as well."""
    given = case.make(3, torch.device("cpu")) | ({"zero_missing": True} if clear else {})
    prepared = case.prepare(**given)
    assert isinstance(prepared.launch, PreparedLaunch) is not clear
    for gpu.stream in (7, 8):
        by_hand = gpu.launched(bare_launch(prepared))
        assert by_hand == gpu.launched(prepared) == gpu.launched(prepared.launch)
        kernels = 2 if case.operator == "moe_w4a16_combine" else len(by_hand)
        assert len(by_hand) == kernels > 0
        assert {stream for _, stream, _, _ in by_hand} == {gpu.stream}
        if clear:
            prepared.out.fill_(3)
            bare_launch(prepared)()
            assert not prepared.out.any()
    times = launch_times(prepared, launches=20)
    assert len(times.bare_samples) == len(times.prepared_samples) == 20


def test_what_launches_no_kernel_has_no_driver_calls():
    case = next(case for case in PREPARED_CASES if case.operator == "moe_w4a16_combine")
    with pytest.raises(TypeError, match="expected a launch of kernels on a GPU, got one of reference"):
        bare_launch(case.prepare(**case.make(3, torch.device("cpu"))))
