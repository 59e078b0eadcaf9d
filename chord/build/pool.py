"""Compiling in parallel processes, each with its own NVRTC.

Each process is driven by a thread of the caller. A process that dies in the middle of a compilation costs that one
result; the next compilation gets a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import local
from types import TracebackType
from typing import IO, TypeVar

import msgspec

from chord.build.nvrtc import Request, Result
from chord.build.toolchain import ToolchainPin
from chord.build.worker import receive, send
from chord.errors import ToolchainError

Key = TypeVar("Key")

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from chord.build.worker import main; main()"


def default_jobs() -> int:
    """One process for each core that this process may use."""
    return len(os.sched_getaffinity(0))


class CompilerPool:
    """`jobs` processes, started when first needed. Use as a context manager: on the way out they are ended."""

    def __init__(self, pin: ToolchainPin, jobs: int) -> None:
        if jobs < 1:
            raise ToolchainError(f"jobs: expected at least 1, got {jobs}")
        self._pin = pin
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="chord-build")
        self._mine = local()
        self._processes: list[CompilerProcess] = []
        self._closing = False

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.end()
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.close()

    def compile_all(self, requests: Mapping[Key, Request]) -> Iterator[tuple[Key, Result]]:
        """Results as they come. Raises ToolchainError when the pinned compiler cannot be loaded."""
        running = {self._threads.submit(self._compile, request): key for key, request in requests.items()}
        for future in _as_completed(running):
            yield running[future], future.result()

    def _compile(self, request: Request) -> Result:
        process: CompilerProcess | None = getattr(self._mine, "process", None)
        if process is None or not process.alive:
            process = self._mine.process = CompilerProcess(self._pin)
            self._processes.append(process)
        if self._closing:  # the pool was left while the process was being started
            process.end()
        return process.compile(request)


def _as_completed(running: Iterable[Future[Result]]) -> Iterator[Future[Result]]:
    """Like concurrent.futures.as_completed, but an interrupt is noticed between two results."""
    pending = set(running)
    while pending:
        done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
        yield from done


class CompilerProcess:
    """One compiler, asked by one thread at a time.

    Its environment is bare: NVRTC reads variables of its own (NVRTC_APPEND_FLAGS and others).
    """

    def __init__(self, pin: ToolchainPin) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        self._popen = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
            [sys.executable, "-I", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "LC_ALL": "C.UTF-8"},
        )
        self._in, self._out = _pipe(self._popen.stdin), _pipe(self._popen.stdout)
        self.alive = True
        refusal = self._load(pin)
        if refusal is not None:
            self.end()
            self.close()
            raise ToolchainError(refusal)

    def compile(self, request: Request) -> Result:
        answer = self._ask(request) if self.alive else None
        if answer is None:
            return Result(cubin=None, log=f"the compiler's process ended without a result (status {self.end()})")
        return msgspec.msgpack.decode(answer, type=Result)

    def _load(self, pin: ToolchainPin) -> str | None:
        """Have the compiler loaded; what is wrong with it, if anything."""
        answer = self._ask(pin)
        if answer is None:
            return f"the compiler's process ended while loading {pin.identity} (status {self.end()})"
        return msgspec.msgpack.decode(answer, type=str | None)

    def end(self) -> int:
        """Stop the process; its exit status. May be called again, and while another thread waits for an answer."""
        self.alive = False
        self._popen.kill()
        return self._popen.wait()

    def close(self) -> None:
        """Close our ends of the pipes, once no thread uses them any more."""
        for pipe in (self._in, self._out):
            with suppress(OSError):  # what the process did not read is flushed into a broken pipe
                pipe.close()

    def _ask(self, message: object) -> bytes | None:
        try:
            send(self._in, message)
            return receive(self._out)
        except (BrokenPipeError, ValueError):
            return None


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # noqa: S101 - Popen was told to make it
    return stream
