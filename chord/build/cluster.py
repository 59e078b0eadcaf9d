"""Compiling on an existing Dask cluster, instead of in processes of this machine.

Its workers need this chord and the pinned NVRTC (`chord-registry[build,cluster]`). Each of a worker's threads drives a
compiler process with a bare environment, as a local build does; what comes back is checked as a local result is.
A Dask cluster runs whatever its members send each other: name only one that you trust with this machine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from threading import Lock, Thread, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec

from chord._version import __version__
from chord.build.nvrtc import Request, Result
from chord.build.pool import CompilerProcess, Key
from chord.build.toolchain import ToolchainPin
from chord.errors import ChordError, ToolchainError

if TYPE_CHECKING:
    from distributed import Client

_CONNECT_S = 20
_LAST_PORT = 65535
_LEAVE_S = 30
"""Most seconds to wait for workers that may be gone, when a build has its results."""


class _Slot(NamedTuple):
    """What one compiler of a worker is for: builds share none, and so neither a compiler's pin nor its end."""

    build: str
    pin: bytes
    thread: int


_processes: dict[_Slot, CompilerProcess] = {}
_ended: deque[str] = deque(maxlen=1024)  # builds whose late compilations must start nothing any more
_lock = Lock()


def scheduler_of(executor: str) -> str:
    """The address in dask://HOST:PORT, as Dask writes it. Raises ChordError for anything else."""
    found = re.fullmatch(r"dask://([^/\s@]+:\d{1,5})", executor)
    if found is None or int(found[1].rpartition(":")[2]) > _LAST_PORT:
        raise ChordError(f"executor {executor!r}: expected dask://HOST:PORT, the address of a Dask scheduler")
    return f"tcp://{found[1]}"


class ClusterPool:
    """The same use as pool.CompilerPool. The cluster decides how many compilations run at a time."""

    def __init__(self, pin: ToolchainPin, executor: str) -> None:
        """executor: dask://HOST:PORT, a scheduler's address. Raises ChordError for anything else."""
        self._address = scheduler_of(executor)
        self._pin = msgspec.msgpack.encode(pin)
        self._build = uuid4().hex

    def __enter__(self) -> ClusterPool:
        from distributed import Client

        try:
            self._client: Client = Client(self._address, timeout=_CONNECT_S, set_as_default=False)
        except OSError as error:
            raise ChordError(f"{self._address}: expected a Dask scheduler, cannot connect: {error}") from error
        if not self._client.scheduler_info(n_workers=-1)["workers"]:
            self._client.close()
            raise ChordError(f"{self._address}: expected a Dask cluster with workers, it has none; start some")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _within(_LEAVE_S, lambda: self._client.run(_end_processes, self._build))
        _within(_LEAVE_S, self._client.close)

    def compile_all(self, requests: Mapping[Key, Request]) -> Iterator[tuple[Key, Result]]:
        """Results as they come. Raises ToolchainError when a worker lacks this chord or the pinned compiler."""
        from distributed import as_completed

        running: dict[Any, Key] = {
            self._client.submit(
                _compile, self._build, self._pin, msgspec.msgpack.encode(request), __version__, pure=False
            ): key
            for key, request in requests.items()
        }
        try:
            for future in as_completed(running, loop=self._client.loop):
                yield running[future], self._result(future)
        finally:
            self._client.cancel(list(running))

    def _result(self, future: Any) -> Result:  # noqa: ANN401 - distributed has no types
        error = future.exception()
        if error is None:
            answer: bytes = future.result()
            return msgspec.msgpack.decode(answer, type=Result)
        if isinstance(error, ToolchainError | ModuleNotFoundError):
            raise ToolchainError(
                f"{self._address}: a worker cannot compile: {error}; install this chord on every worker: "
                "pip install 'chord-registry[build,cluster]'"
            ) from error
        return Result(cubin=None, log=f"{self._address}: the worker ended without a result: {error}")


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Makes a call that may take for ever, or fail: a cluster that is going down has nothing left to end."""

    def attempt() -> None:
        with suppress(Exception):
            call()

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


def _compile(build: str, pin: bytes, request: bytes, version: str) -> bytes:
    """Runs on a worker: text and plain bytes in, plain bytes out. `build` names the build that ends the compiler."""
    if version != __version__:
        raise ToolchainError(f"it has chord {__version__}, the build is by chord {version}")
    process = _compiler(_Slot(build, pin, get_ident()))
    return msgspec.msgpack.encode(process.compile(msgspec.msgpack.decode(request, type=Request)))


def _compiler(slot: _Slot) -> CompilerProcess:
    """The compiler of a build and a thread, alive unless the build has ended."""
    with _lock:
        process = _processes.get(slot)
    if process is not None and process.alive:
        return process
    if process is not None:
        process.close()
    process = CompilerProcess(msgspec.msgpack.decode(slot.pin, type=ToolchainPin))
    with _lock:
        if slot.build not in _ended:
            _processes[slot] = process
            return process
    process.end()
    process.close()
    return process


def _end_processes(build: str) -> None:
    """Runs on each worker when a build has ended: no compiler of it outlives it, and others are left alone."""
    with _lock:
        _ended.append(build)
        mine = [_processes.pop(slot) for slot in list(_processes) if slot.build == build]
    for process in mine:
        process.end()
        process.close()
