"""CUDA graphs of prepared launches, for checks and measurements."""

from __future__ import annotations

from collections.abc import Callable

import torch


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    """A replay of the call's CUDA graph: no host time between its kernels. The call must allocate nothing; it lives as
    long as the replay, whose kernels use its memory.

    torch.cuda.graph would also wait for the GPU and give all unused memory back, each time: too slow for a sweep.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)

    def replay(_kept: Callable[[], object] = call) -> None:
        graph.replay()

    return replay
