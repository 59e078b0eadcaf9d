"""A program on a device, and launches of it with everything prepared.

The hot path is `PreparedLaunch.__call__`: ask for the stream, find the configurations made for it, call the driver.
It allocates no device memory, waits for nothing, hashes nothing, opens nothing and reads no environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import NamedTuple

from chord.errors import UnsupportedDeviceError
from chord.registry import grid
from chord.registry.arguments import Packed, Packer
from chord.registry.driver import WRONG_CONTEXT, Driver, Handle
from chord.registry.schema import Arm, KernelConfig, Program

StreamProvider = Callable[[], int]
"""Gives the handle of the stream to launch on, each time it is asked. 0 is the device's default stream."""

DriverCall = Callable[[Handle, Handle, int, int], tuple[int, ...]]
"""cuLaunchKernelEx of cuda-python: configuration, function, address of the parameters, 0; the result code first."""

_MAX_STREAMS = 256
"""Streams that one prepared launch remembers before it starts again; a process that makes new ones must not grow."""


class _Step(NamedTuple):
    """One kernel of the program on this device, with what bounds its grid."""

    kernel: KernelConfig
    function: Handle
    resident: int | None
    multiprocessors: int | None


class _Launch(NamedTuple):
    """One kernel of a prepared launch: of how many blocks, with which arguments."""

    kernel: KernelConfig
    function: Handle
    blocks: int
    packed: Packed


_Steps = tuple[tuple[Handle, Handle, int], ...]
"""The kernels of a launch on one stream: configuration, function, address of the parameters."""


class Kernel:
    """All kernels of one program, loaded on one device. Made by `Registry.load`."""

    def __init__(
        self,
        name: str,
        program: Program,
        arm: Arm,
        arch: str,
        device: int,
        driver: Driver,
        functions: Sequence[Handle],
    ) -> None:
        self.name = name
        self.program = program
        self.arch = arch
        self.device = device
        self.args = arm.args
        self._driver = driver
        self._packer = Packer(arm.args)
        self._steps = tuple(self._step(k, f) for k, f in zip(program.kernels, functions, strict=True))

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, device={self.device})"

    def workspace_bytes(self, num_tokens: int) -> int:
        """Size of the program's scratch memory for that many tokens; 0 when it needs none."""
        return self.program.workspace.bytes + self.program.workspace.bytes_per_token * num_tokens

    def prepare(
        self,
        arguments: Mapping[str, object],
        *,
        stream: StreamProvider | int | None = None,
        owners: object = None,
    ) -> PreparedLaunch:
        """Bind every argument of `args` by name; the result can be launched any number of times.

        Buffers are addresses, None (null) or contiguous arrays on this device (DLPack, `__cuda_array_interface__`),
        which the result keeps alive; parameters are numbers. stream: a handle, or a provider that is asked at every
        launch; without one the device's default stream. owners: kept alive as well, for buffers given by address.
        Raises ValueError naming the argument. May be called inside a capture.
        """
        packed = self._packer.pack(arguments, self.device, self._driver)
        packed = packed._replace(keep=(*packed.keep, owners))
        launches = [_Launch(step.kernel, step.function, self._blocks(step, arguments), packed) for step in self._steps]
        made = PreparedLaunch(self.name, self.device, self._driver, launches, _provider(stream))
        if not callable(stream):
            made.make_ready(made._stream())
        return made

    def _step(self, kernel: KernelConfig, function: Handle) -> _Step:
        rule = kernel.grid
        resident = multiprocessors = None
        if rule.co_resident:
            with self._driver.context(self.device):
                resident = self._driver.resident_blocks(function, kernel, self.device)
            if resident < rule.min_resident:
                least = -(-rule.min_resident // kernel.cluster)
                raise UnsupportedDeviceError(
                    f"{self.name}: device {self.device} cannot hold {_shape(kernel, least)} of {kernel.symbol} at a "
                    "time, as its grid-wide join needs; a partition of the device or another process may limit it"
                )
        if rule.max_per_sm is not None:
            multiprocessors = self._driver.multiprocessors(self.device)
        self._driver.launch_config(kernel, kernel.cluster, 0)  # the process's first one takes half a millisecond
        return _Step(kernel, function, resident, multiprocessors)

    def _blocks(self, step: _Step, arguments: Mapping[str, object]) -> int:
        rule = step.kernel.grid
        value = 0 if rule.param is None else index(arguments[rule.param])  # type: ignore[arg-type]
        return grid.blocks(rule, step.kernel.cluster, value, step.resident, step.multiprocessors)


class PreparedLaunch:
    """Calling it launches the program's kernels, in order, on the stream that the provider names.

    Threads may share it: configurations are made once per stream and never changed. It follows CUDA's rules for
    captures: on a capturing stream the launch becomes part of the graph, which needs this object's arrays alive.
    """

    __slots__ = (
        "_by_stream",
        "_call",
        "_device",
        "_driver",
        "_foreign",
        "_launches",
        "_stream",
        "name",
    )

    def __init__(
        self,
        name: str,
        device: int,
        driver: Driver,
        launches: Sequence[_Launch],
        stream: StreamProvider,
    ) -> None:
        self.name = name
        self._device = device
        self._driver = driver
        self._launches = tuple(launches)
        self._stream = stream
        self._call = driver.launch
        self._by_stream: dict[int, _Steps] = {}
        self._foreign = False

    @property
    def grids(self) -> tuple[int, ...]:
        """Blocks of each kernel."""
        return tuple(launch.blocks for launch in self._launches)

    def followed_by(self, other: PreparedLaunch) -> PreparedLaunch:
        """One launch of these kernels and then of the other's, on the stream that this one's provider names.

        It asks for the stream once, and so costs the host less than two. Raises ValueError for another device's launch.
        """
        if (other._device, other._driver) != (self._device, self._driver):
            raise ValueError(
                f"other: expected a launch on device {self._device}, as {self.name}, got {other.name} on device "
                f"{other._device}; prepare both on one device"
            )
        launches, name = (*self._launches, *other._launches), f"{self.name} and {other.name}"
        return PreparedLaunch(name, self._device, self._driver, launches, self._stream)

    def make_ready(self, stream: int) -> None:
        """Make the configurations for a stream now, so that the first launch on it costs what later ones do."""
        if stream not in self._by_stream:
            self._configure(stream)

    def driver_calls(self, stream: int) -> tuple[DriverCall, tuple[tuple[Handle, Handle, int, int], ...]]:
        """The driver's function, and the arguments of each call of it that a launch on `stream` makes, in order.

        For measurements: calling the function is the launch without anything of ours around it. The arguments are
        addresses in memory that this object owns.
        """
        steps = self._by_stream.get(stream) or self._configure(stream)
        return self._call, tuple((*step, 0) for step in steps)

    def __call__(self) -> None:
        """Raises DriverError when the driver refuses; what was launched before that stays launched."""
        stream = self._stream()
        steps = self._by_stream.get(stream) or self._configure(stream)
        if self._foreign:
            self._launch_in_own_context(steps)
            return
        call = self._call
        for position, (config, function, params) in enumerate(steps):
            result = call(config, function, params, 0)
            if result[0]:
                self._refused(result, steps[position:])
                return

    def _configure(self, stream: int) -> _Steps:
        handle = index(stream)
        steps = tuple(
            (self._driver.launch_config(kernel, blocks, handle), function, packed.address)
            for kernel, function, blocks, packed in self._launches
        )
        if len(self._by_stream) >= _MAX_STREAMS:
            self._by_stream.clear()
        self._by_stream[stream] = steps
        return steps

    def _refused(self, result: tuple[int, ...], steps: Sequence[tuple[Handle, Handle, int]]) -> None:
        """A default stream belongs to the current context: if that is not ours, launch in ours, now and later."""
        if int(result[0]) in WRONG_CONTEXT:
            self._launch_in_own_context(steps)
            self._foreign = True
        else:
            self._driver.check(result, f"launching {self.name} on device {self._device}")

    def _launch_in_own_context(self, steps: Sequence[tuple[Handle, Handle, int]]) -> None:
        with self._driver.context(self._device):
            for config, function, params in steps:
                result = self._call(config, function, params, 0)
                self._driver.check(result, f"launching {self.name} on device {self._device}")


def _provider(stream: StreamProvider | int | None) -> StreamProvider:
    if callable(stream):
        return stream
    fixed = 0 if stream is None else index(stream)
    return lambda: fixed


def _shape(kernel: KernelConfig, count: int) -> str:
    """`count` clusters, or blocks where there are no clusters."""
    many, number = ("", "one") if count == 1 else ("s", str(count))
    blocks = f"cluster{many} of {kernel.cluster} blocks" if kernel.cluster > 1 else f"block{many}"
    return f"{number} {blocks} with {kernel.dynamic_smem_bytes} bytes of dynamic shared memory"
