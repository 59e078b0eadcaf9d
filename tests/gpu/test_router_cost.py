"""What a prepared launch costs on the host, and what it must not do."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import statistics
import time

import pytest
import torch

from chord.bench.host import launch_times
from chord.checks.inputs import normal_case
from chord.router import fused_router, prepare_fused_router

pytestmark = pytest.mark.gpu


@pytest.fixture
def prepared(device):
    case = normal_case(1, 896, torch.float32, device)
    launch = prepare_fused_router(case.logits, case.bias, top_k=16, block_m=8)
    launch()
    torch.cuda.synchronize()
    return launch


def test_r21_at_most_a_microsecond_above_a_bare_driver_call(prepared):
    times = launch_times(prepared, launches=10_000)
    shown = f"prepared {times.prepared_us:.2f} us, bare {times.bare_us:.2f} us"
    assert times.prepared_us - times.bare_us <= 1.0, shown


def test_r21_nothing_is_read_hashed_or_parsed(prepared, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a prepared launch does only the launch")

    for owner, name in (
        (builtins, "open"),
        (os, "open"),
        (os, "stat"),
        (os, "getenv"),
        (type(os.environ), "__getitem__"),
        (hashlib, "sha256"),
        (json, "loads"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    for _ in range(100):
        prepared()
    monkeypatch.undo()
    torch.cuda.synchronize()


def test_r21_no_allocation_and_no_wait(prepared, device):
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda._sleep(100_000_000)  # about 50 ms of GPU work in front
    start = time.perf_counter()
    for _ in range(20):
        prepared()
    waited_ms = (time.perf_counter() - start) * 1e3
    assert not torch.cuda.current_stream(device).query(), "the sleep ended too early for this test to mean anything"
    assert waited_ms < 20, f"20 launches behind a 50 ms kernel returned after {waited_ms:.1f} ms"
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


def test_repeated_eager_calls_look_nothing_up_again(device, monkeypatch):
    case = normal_case(3, 896, torch.float32, device)
    fused_router(case.logits, case.bias, top_k=16, block_m=8)
    monkeypatch.setattr("chord.router.launch.load", None)
    durations = []
    for _ in range(200):
        start = time.perf_counter()
        fused_router(case.logits, case.bias, top_k=16, block_m=8)
        durations.append((time.perf_counter() - start) * 1e6)
    assert statistics.median(durations) < 200, "microseconds an eager call"
