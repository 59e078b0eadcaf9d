"""The one place that talks to the CUDA driver: convert, make one call, turn its result code into an exception.

cuda.bindings is imported when the driver is first needed, never before. Handles are opaque here and everywhere else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any

from chord.errors import CaptureError, DriverError, DriverNotFoundError, ForkError
from chord.registry.architectures import of_capability
from chord.registry.schema import KernelConfig

Handle = Any
"""A module, function, context or launch configuration, as cuda.bindings hands it out."""

NOT_INITIALIZED = 3
WRONG_CONTEXT = frozenset({201, 400})
"""Codes of a launch when another device's context, or none, is current: invalid context, invalid handle."""

_NO_DEVICE = 100
_CAPTURE_CODES = range(900, 910)
"""CUDA_ERROR_STREAM_CAPTURE_*."""

_INSTALL_DRIVER = "install NVIDIA's display driver (nvidia-smi must work), and in a container pass the GPU through"


class Driver:
    """The driver's calls that are needed here, over the functions of cuda.bindings.driver (or of a fake, in tests).

    Every method may raise DriverError with the driver's code and name. Devices are CUDA ordinals.
    """

    def __init__(self, api: Any = None) -> None:  # noqa: ANN401 - a module, or what stands in for one
        self._api = api
        self._started_in: int | None = None
        self._lock = threading.Lock()
        self._contexts: dict[int, Handle] = {}

    def start(self) -> None:
        """Initialise CUDA once. Raises DriverNotFoundError without one, ForkError in a child of a process that did."""
        if self._started_in == os.getpid():
            return
        with self._lock:
            if self._started_in is None:
                self._initialize()
                self._started_in = os.getpid()
            elif self._started_in != os.getpid():
                raise fork_error()

    @property
    def api(self) -> Any:  # noqa: ANN401
        """The functions and types of cuda.bindings.driver, CUDA being initialised."""
        self.start()
        return self._api

    def _initialize(self) -> None:
        if self._api is None:
            self._api = _bindings()
        try:
            result = self._api.cuInit(0)
        except RuntimeError as error:  # cuda.bindings did not find libcuda
            raise DriverNotFoundError(f"expected a CUDA driver, found none ({error}); {_INSTALL_DRIVER}") from error
        if result[0] == NOT_INITIALIZED:
            raise fork_error()
        if result[0] == _NO_DEVICE:
            raise DriverNotFoundError(
                f"expected a CUDA device, the driver sees none; {_INSTALL_DRIVER}; check CUDA_VISIBLE_DEVICES",
                int(result[0]),
                "CUDA_ERROR_NO_DEVICE",
            )
        self.check(result, "cuInit")

    def check(self, result: tuple[Any, ...], doing: str) -> Any:  # noqa: ANN401 - whatever the call returns
        """The value of a call. `doing` says in an error what was attempted."""
        code = int(result[0])
        if code == 0:
            return result[1] if len(result) == 2 else result[1:]
        name = str(getattr(result[0], "name", code))
        if code == NOT_INITIALIZED:
            raise fork_error()
        if code in _CAPTURE_CODES:
            raise CaptureError(
                f"{doing}: the CUDA driver answered {name} ({code}): a graph capture is open; "
                "preload the program before the capture begins"
            )
        raise DriverError(f"{doing}: the CUDA driver answered {name} ({code})", code, name)

    # Devices

    def version(self) -> int:
        """The newest CUDA that the driver supports, for example 12090."""
        return int(self.check(self.api.cuDriverGetVersion(), "reading the driver's version"))

    def device_count(self) -> int:
        return int(self.check(self.api.cuDeviceGetCount(), "counting devices"))

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        attributes = self.api.CUdevice_attribute
        return (
            self._attribute(device, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(device, attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )

    def architecture(self, device: int) -> str:
        """The architecture whose cubins the device takes. Raises UnsupportedDeviceError if there is none."""
        return of_capability(*self.capability(device))

    def multiprocessors(self, device: int) -> int:
        return self._attribute(device, self.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)

    def _attribute(self, device: int, attribute: Any) -> int:  # noqa: ANN401
        doing = f"asking about device {device}"
        handle = self.check(self.api.cuDeviceGet(device), doing)
        return int(self.check(self.api.cuDeviceGetAttribute(attribute, handle), doing))

    def current_device(self) -> int:
        """The device of the calling thread's context, 0 where the thread has none."""
        if int(self.check(self.api.cuCtxGetCurrent(), "asking for the current context")) == 0:
            return 0
        return int(self.check(self.api.cuCtxGetDevice(), "asking for the current device"))

    def pointer_device(self, pointer: int) -> int | None:
        """The device that owns an address, None when the driver does not know it."""
        attribute = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        result = self.api.cuPointerGetAttribute(attribute, pointer)
        return None if int(result[0]) else int(result[1])

    def capture_id(self, stream: int) -> int | None:
        """Which graph capture a capturing stream takes part in, unique in the process; None when the driver cannot say.

        A driver interface older than CUDA 13 has no answer after a dependent launch (its edge data would be lost).
        """
        query = getattr(self.api, "cuStreamGetCaptureInfo_v3", None) or self.api.cuStreamGetCaptureInfo
        result = query(stream)
        return None if int(result[0]) else int(result[2])

    # Contexts

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the device's primary context current in this thread, and afterwards whatever was current before."""
        handle = self._contexts.get(device)
        if handle is None:
            handle = self._contexts.setdefault(device, self._retain(device))
        self.check(self.api.cuCtxPushCurrent(handle), f"switching to device {device}")
        try:
            yield
        finally:
            self.check(self.api.cuCtxPopCurrent(), f"switching back from device {device}")

    def _retain(self, device: int) -> Handle:
        """Retained for the life of the process, as kernels stay loaded that long."""
        doing = f"opening device {device}"
        return self.check(self.api.cuDevicePrimaryCtxRetain(self.check(self.api.cuDeviceGet(device), doing)), doing)

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Allow this thread to load modules while any thread captures a graph, without spoiling the capture."""
        doing = "relaxing the stream capture mode"
        relaxed = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self.check(self.api.cuThreadExchangeStreamCaptureMode(relaxed), doing)
        try:
            yield
        finally:
            self.check(self.api.cuThreadExchangeStreamCaptureMode(before), doing)

    # Modules and functions. The device's context must be current.

    def load_module(self, image: bytes, place: str) -> Handle:
        return self.check(self.api.cuModuleLoadData(image), f"loading {place}")

    def unload_module(self, module: Handle) -> None:
        self.check(self.api.cuModuleUnload(module), "unloading a module")

    def function(self, module: Handle, symbol: str) -> Handle:
        return self.check(self.api.cuModuleGetFunction(module, symbol.encode()), f"finding kernel {symbol}")

    def configure(self, function: Handle, kernel: KernelConfig) -> None:
        """Allow the function its dynamic shared memory and a cluster of more than 8 blocks, and put it on the device.

        Without the latter the driver would do so at the first launch, which takes several times a launch's own time.
        """
        attributes = self.api.CUfunction_attribute
        wanted = []
        if kernel.dynamic_smem_bytes:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.dynamic_smem_bytes))
        if kernel.cluster > 8:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in wanted:
            result = self.api.cuFuncSetAttribute(function, attribute, value)
            self.check(result, f"allowing kernel {kernel.symbol} {attribute.name} = {value}")
        self.check(self.api.cuFuncLoad(function), f"loading kernel {kernel.symbol}")

    def resident_blocks(self, function: Handle, kernel: KernelConfig, device: int) -> int:
        """How many blocks (a whole number of clusters) the device holds at once."""
        doing = f"asking how many blocks of {kernel.symbol} fit"
        if kernel.cluster > 1:
            config = self.launch_config(kernel, kernel.cluster, 0)
            return kernel.cluster * int(self.check(self.api.cuOccupancyMaxActiveClusters(function, config), doing))
        threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
        result = self.api.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, kernel.dynamic_smem_bytes)
        return int(self.check(result, doing)) * self.multiprocessors(device)

    # Launches

    def launch_config(self, kernel: KernelConfig, blocks: int, stream: int) -> Handle:
        """A CUlaunchConfig: immutable once made, so that threads may share it."""
        config = self.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block
        config.sharedMemBytes = kernel.dynamic_smem_bytes
        config.hStream = stream
        attributes = self._launch_attributes(kernel)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        return config

    def _launch_attributes(self, kernel: KernelConfig) -> list[Any]:
        ids = self.api.CUlaunchAttributeID
        attributes = []
        if kernel.cluster > 1:
            attribute = self._launch_attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            cluster = attribute.value.clusterDim
            cluster.x, cluster.y, cluster.z = kernel.cluster, 1, 1
            attributes.append(attribute)
        if kernel.cooperative:
            attribute = self._launch_attribute(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if kernel.dependent:
            attribute = self._launch_attribute(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        return attributes

    def _launch_attribute(self, kind: Any) -> Any:  # noqa: ANN401
        attribute = self.api.CUlaunchAttribute()
        attribute.id = kind
        return attribute

    @property
    def launch(self) -> Any:  # noqa: ANN401
        """cuLaunchKernelEx(config, function, address of the parameters, 0) itself: no layer on the hot path."""
        return self.api.cuLaunchKernelEx


def fork_error() -> ForkError:
    return ForkError(
        "CUDA was initialised before this process was forked, and cannot be used in the child; start workers with the "
        "spawn or forkserver method, or fork before the first load"
    )


@lru_cache(maxsize=1)
def default_driver() -> Driver:
    """The process's driver. Touches nothing until it is started."""
    return Driver()


def _bindings() -> Any:  # noqa: ANN401
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverNotFoundError(
            f"expected cuda-python 12.9 or 13, cannot import cuda.bindings ({error}); "
            "pip install 'cuda-python>=12.9,<14'"
        ) from error
