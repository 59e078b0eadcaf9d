"""What the operators share at run time: one registry, the devices' architectures, and how a launch finds its stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from typing import NamedTuple

import torch

from chord.errors import NoProgramError
from chord.registry import Registry
from chord.registry.architectures import of_capability
from chord.registry.schema import Operator

with suppress(ImportError):  # the first launch says what is missing; it should not wait 20 ms for what is there
    import_module("cuda.bindings.driver")


class Prepared(NamedTuple):
    """A launch bound to its buffers, which it keeps alive, and the program's name."""

    launch: Callable[[], object]
    program: str


@lru_cache(maxsize=1)
def registry() -> Registry:
    """The registry that the operators use, opened at the first launch (CHORD_REGISTRY and the pins decide which)."""
    return Registry.open()


@lru_cache(maxsize=64)
def architecture(device: int) -> str:
    """The architecture name of a device. Raises UnsupportedDeviceError for a GPU that no cubin can serve."""
    return of_capability(*torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def operator(name: str) -> Operator:
    """An operator of the registry. Raises NoProgramError when it has none of this name."""
    operators = registry().manifest.operators
    if name not in operators:
        raise NoProgramError(f"{name}: this registry has {', '.join(sorted(operators)) or 'nothing'}")
    return operators[name]


def raw_stream(device: int) -> int:
    """Handle of torch's current stream on a device."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def stream_provider(device: int) -> Callable[[], int]:
    """Asks torch for its current stream at every launch, without a Python frame in between."""
    return partial(torch._C._cuda_getCurrentRawStream, device)
