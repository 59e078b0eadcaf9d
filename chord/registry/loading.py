"""Kernels on devices: loaded when first asked for, once per device and cubin, and kept until the process ends.

They are never unloaded because a captured graph may launch them at any later time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from chord.errors import CaptureError, DriverError
from chord.registry.driver import Driver, Handle, default_driver
from chord.registry.schema import KernelConfig


class Loader:
    """Functions by (device, cubin hash). Threads may ask at once; a cubin is read, proven and loaded by one of them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, str], tuple[Handle, ...]] = {}

    def functions(
        self, device: int, sha256: str, kernels: Sequence[KernelConfig], place: str, prove: Callable[[], bytes]
    ) -> tuple[Handle, ...]:
        """The functions of a cubin's kernels, in order. `prove` gives its verified bytes, `place` names it in errors.

        A failure leaves nothing behind: neither a function nor a module. Safe while any thread captures a graph;
        raises CaptureError, naming what to preload, should the driver refuse.
        """
        self.driver.start()
        key = (device, sha256)
        with self._lock:
            found = self._loaded.get(key)
            if found is None:
                image = prove()
                try:
                    with self.driver.context(device), self.driver.relaxed_capture():
                        found = self._load(image, kernels, place)
                except CaptureError as error:
                    raise CaptureError(f"{place} cannot be loaded inside a capture: {error}") from error
                self._loaded[key] = found
        return found

    def _load(self, image: bytes, kernels: Sequence[KernelConfig], place: str) -> tuple[Handle, ...]:
        module = self.driver.load_module(image, place)
        try:
            functions = tuple(self.driver.function(module, kernel.symbol) for kernel in kernels)
            for function, kernel in zip(functions, kernels, strict=True):
                self.driver.configure(function, kernel)
        except DriverError:
            self.driver.unload_module(module)
            raise
        return functions


@lru_cache(maxsize=1)
def default_loader() -> Loader:
    """The process's loader: registries share it, so that a cubin is on a device once."""
    return Loader(default_driver())
