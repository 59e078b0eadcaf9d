"""The pinned NVRTC through ctypes: source and headers in memory go in, a cubin and the compiler's log come out.

No header of a CUDA toolkit, no driver and no other NVRTC takes part. Meant for a process of its own (worker.py): the
compiler serialises compilations within a process, and may take the process down with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import msgspec

from chord.build import toolchain
from chord.build.toolchain import ToolchainPin
from chord.errors import ToolchainError

_SUCCESS = 0
_Program = ctypes.c_void_p


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One compilation."""

    name: str
    """What the log calls the source."""
    source: str
    headers: Mapping[str, str]
    options: tuple[str, ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: `cubin` is None when the compiler refused, and `log` then says why."""

    cubin: bytes | None
    log: str


class Nvrtc:
    """The loaded compiler."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def open(cls, pin: ToolchainPin) -> Nvrtc:
        """Check the pinned libraries and load them. Raises ToolchainError."""
        found = toolchain.find(pin)
        try:
            # NVRTC opens its builtins by name: loaded before it, from the same folder, no other file can be taken.
            ctypes.CDLL(str(found.builtins))
            library = ctypes.CDLL(str(found.nvrtc))
        except OSError as error:
            raise ToolchainError(f"{found.nvrtc}: expected to load it, got: {error}") from error
        compiler = cls(library)
        version = compiler.version()
        if ".".join(pin.compiler.version.split(".")[:2]) != version:
            raise ToolchainError(f"{found.nvrtc} says that it is NVRTC {version}, the pin is {pin.compiler.version}")
        return compiler

    def version(self) -> str:
        """Major and minor version: 12.9."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, request: Request) -> Result:
        """Compile one source. One that does not compile gives a Result too; ToolchainError: NVRTC itself failed."""
        program = _Program()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            request.source.encode(),
            request.name.encode(),
            len(request.headers),
            _strings(list(request.headers.values())),
            _strings(list(request.headers)),
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(request.options), _strings(request.options))
            log = (
                self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                .rstrip(b"\0")
                .decode(errors="replace")
            )
            if status != _SUCCESS:
                return Result(cubin=None, log=log or self._explain(status))
            return Result(cubin=self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log=log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, size_call: str, data_call: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_call, program, ctypes.byref(size))
        data = ctypes.create_string_buffer(max(size.value, 1))
        self._call(data_call, program, data)
        return data.raw[: size.value]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise ToolchainError(f"{name}: {self._explain(status)}")

    def _explain(self, status: int) -> str:
        explain = self._library.nvrtcGetErrorString
        explain.restype = ctypes.c_char_p
        return f"{explain(status).decode()} ({status})"


def _strings(values: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))
