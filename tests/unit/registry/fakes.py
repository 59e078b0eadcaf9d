# ruff: noqa: N802 - functions are named as the driver names them
"""A CUDA driver that runs nothing: the functions of cuda.bindings.driver that chord calls, over the real types.

It records every call, can fail at a chosen one, and keeps the rules that matter here: contexts are per thread, a
default stream belongs to the current context, and a load in any mode but RELAXED spoils a capture that is open.
"""

from __future__ import annotations

import threading
from collections import Counter

from cuda.bindings import driver as cuda

SUCCESS = cuda.CUresult.CUDA_SUCCESS
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class FakeApi:
    """Stands in for the module cuda.bindings.driver. Types come from the real one, functions from here."""

    def __init__(self, capabilities=((9, 0),), version=13000, resident_per_sm=2, clusters=33):
        self.capabilities = capabilities
        self.driver_version = version
        self.resident_per_sm = resident_per_sm
        self.clusters = clusters
        self.calls: list[tuple[str, tuple]] = []
        self.failures: dict[str, tuple[int, int]] = {}
        self.capturing = self.spoiled = False
        self.images: dict[int, bytes] = {}
        self.launches: list[dict] = []
        self.attributes: dict[int, dict[str, int]] = {}
        self.owner: dict[int, int] = {}
        self._next = 0x1000
        self._thread = threading.local()
        self._lock = threading.Lock()

    def fail(self, name: str, code: int, nth: int = 1) -> None:
        """Let the nth call of a function answer with `code`."""
        self.failures[name] = (nth, code)

    def count(self, name: str) -> int:
        return sum(call == name for call, _ in self.calls)

    @property
    def contexts(self) -> list[int]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack, self._thread.mode = [], cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        return self._thread.stack

    def __getattr__(self, name: str):
        function = getattr(type(self), f"_{name}", None)
        if function is None:
            if name.startswith("cu"):
                raise AssertionError(f"the fake driver has no {name}")
            return getattr(cuda, name)

        def call(*args):
            with self._lock:
                self.calls.append((name, args))
                nth, code = self.failures.get(name, (0, 0))
                if nth and self.count(name) == nth:
                    return (cuda.CUresult(code), None)
            return function(self, *args)

        return call

    def _handle(self, device: int) -> int:
        with self._lock:
            self._next += 1
            self.owner[self._next] = device
            return self._next

    def _cuInit(self, flags):
        return (SUCCESS,)

    def _cuDriverGetVersion(self):
        return SUCCESS, self.driver_version

    def _cuDeviceGetCount(self):
        return SUCCESS, len(self.capabilities)

    def _cuDeviceGet(self, ordinal):
        if not 0 <= ordinal < len(self.capabilities):
            return (cuda.CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        return SUCCESS, ordinal

    def _cuDeviceGetAttribute(self, attribute, device):
        values = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": self.capabilities[device][0],
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": self.capabilities[device][1],
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
        }
        return SUCCESS, values[attribute.name]

    def _cuCtxGetCurrent(self):
        return SUCCESS, self.contexts[-1] if self.contexts else 0

    def _cuCtxGetDevice(self):
        return SUCCESS, self.contexts[-1] - 1

    def _cuDevicePrimaryCtxRetain(self, device):
        return SUCCESS, device + 1

    def _cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (SUCCESS,)

    def _cuCtxPopCurrent(self):
        return SUCCESS, self.contexts.pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        assert self.contexts
        before, self._thread.mode = self._thread.mode, mode
        return SUCCESS, before

    def _cuModuleLoadData(self, image):
        if self.capturing and self._thread.mode != RELAXED:
            self.spoiled = True
            return (cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None)
        module = self._handle(self.contexts[-1] - 1)
        self.images[module] = bytes(image)
        return SUCCESS, module

    def _cuModuleUnload(self, module):
        del self.images[module]
        return (SUCCESS,)

    def _cuModuleGetFunction(self, module, symbol):
        assert symbol in self.images[module]
        return SUCCESS, self._handle(self.owner[module])

    def _cuFuncLoad(self, function):
        if self.capturing and self._thread.mode != RELAXED:
            self.spoiled = True
            return (cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return (SUCCESS,)

    def _cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.setdefault(function, {})[attribute.name] = value
        return (SUCCESS,)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, smem):
        return SUCCESS, self.resident_per_sm

    def _cuOccupancyMaxActiveClusters(self, function, config):
        return SUCCESS, self.clusters

    def _cuPointerGetAttribute(self, attribute, pointer):
        return SUCCESS, pointer >> 40

    def _cuLaunchKernelEx(self, config, function, params, extra):
        stream = int(config.hStream)
        if stream == 0:
            if not self.contexts:
                return (cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
            if self.contexts[-1] - 1 != self.owner[function]:
                return (cuda.CUresult.CUDA_ERROR_INVALID_HANDLE,)
        launch = {"function": function, "stream": stream, "grid": config.gridDimX, "params": params, "config": config}
        self.launches.append(launch)
        return (SUCCESS,)

    def tally(self) -> Counter:
        return Counter(name for name, _ in self.calls)
