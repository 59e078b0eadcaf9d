"""Scratch memory of router launches, outside the user's buffers.

A plain workspace may hold anything: each launch gets one from torch's allocator. A self-resetting ("zeroed") workspace
must be zero before its first launch, and every launch leaves it fit for the next one of the same program; such
launches must not overlap. So there is one per program and stream, and inside a graph capture one per program, stream
and capture.
"""

from __future__ import annotations

import threading

import torch

from chord.registry.driver import default_driver

_by_stream: dict[tuple[int, int, str], torch.Tensor] = {}
_by_capture: dict[tuple[int, int, str], tuple[int, torch.Tensor]] = {}
_lock = threading.Lock()


def new(device: int, size: int, zeroed: bool) -> torch.Tensor:
    """[size] uint8 that nobody else uses, ready on every stream (inside a capture: on the capturing one)."""
    if not zeroed:
        return torch.empty(size, dtype=torch.uint8, device=_place(device))
    workspace = torch.zeros(size, dtype=torch.uint8, device=_place(device))
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
    return workspace


def shared(device: int, stream: int, program: str, size: int) -> torch.Tensor:
    """At least `size` bytes of self-resetting memory for a launch of `program` on torch's current stream, `stream`."""
    if torch.cuda.is_current_stream_capturing():
        return _of_capture(device, stream, program, size)
    key = (device, stream, program)
    workspace = _by_stream.get(key)
    if workspace is None or workspace.numel() < size:
        with _lock:
            workspace = _by_stream.get(key)
            if workspace is None or workspace.numel() < size:
                workspace = torch.zeros(size, dtype=torch.uint8, device=_place(device))
                _by_stream[key] = workspace
    return workspace


def _of_capture(device: int, stream: int, program: str, size: int) -> torch.Tensor:
    """Zeroed by the graph itself, once before its first launch of the program.

    The memory is the graph's. It is held here until a later capture on the stream, so that nothing else in the same
    graph is put there; graphs that share a memory pool may share it, as each replay zeroes it again.
    """
    capture = default_driver().capture_id(stream)
    key = (device, stream, program)
    held = _by_capture.get(key)
    if held is not None and held[0] == capture and held[1].numel() >= size:
        return held[1]
    workspace = torch.zeros(size, dtype=torch.uint8, device=_place(device))
    if capture is not None:
        _by_capture[key] = (capture, workspace)
    return workspace


def _place(device: int) -> torch.device:
    return torch.device("cuda", device)
