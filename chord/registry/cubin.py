"""Reading a cubin: the architecture it was compiled for, its kernels and what they need. No driver, no toolkit.

A cubin is a 64-bit little-endian ELF of machine EM_CUDA. Everything read here comes from three places:
the header's flags (target), the symbol table (kernels), and the `.nv.info` sections, which are lists of attributes
`format u8, code u8, size or value u16 [, size bytes]`.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from chord.errors import VerificationError

_EM_CUDA = 190
_MACHINES = {3: "x86", 62: "x86-64", 183: "AArch64", _EM_CUDA: "CUDA"}
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_NOBITS = 8
_STT_FUNC = 2
_STO_CUDA_ENTRY = 0x10

# Attribute codes of .nv.info (EIATTR_*): the first three hold (symbol index, value), the last describes a parameter.
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_REGCOUNT = 0x2F
_KPARAM_INFO = 0x17
_FORMAT_SIZED = 4

_MAX_SECTIONS = 4096
_MAX_KERNELS = 1024
_MAX_NAME_BYTES = 4096
_MAX_ATTRIBUTES = 1 << 16
"""Far above any cubin's: a file that says otherwise costs neither time nor memory."""

RESERVED_SMEM_BYTES = 1024
"""Shared memory that every block of sm_90 and later gives to the system. The cubin counts it, ptxas and we do not."""


_FAULTS = (struct.error, ValueError, IndexError, KeyError, OverflowError)
"""How an inconsistency in a file surfaces."""


@dataclass(frozen=True)
class KernelInfo:
    """What one kernel needs. `registers`, `spill_bytes` and `static_smem_bytes` agree with what `ptxas -v` prints."""

    registers: int
    """32-bit registers a thread."""
    spill_bytes: int
    """Local memory a thread, in bytes: ptxas' cumulative stack. Spilled registers and arrays that were not kept in
    registers both land there, and a cubin does not tell them apart; 0 means that there is neither."""
    static_smem_bytes: int
    """Declared `__shared__` memory of a block, in bytes, without the system's share."""
    parameter_bytes: tuple[int, ...]
    """Size of each parameter, in order."""


@dataclass(frozen=True)
class CubinInfo:
    arch: str
    """For example "sm_90a". A cubin for sm_100f cannot be told from one for sm_100 and reads as the latter."""
    kernels: dict[str, KernelInfo]
    """By symbol, in the order of the symbol table."""


def parse(data: bytes) -> CubinInfo:
    """Read a cubin. Raises VerificationError, saying what `data` looks like instead, for anything else."""
    try:
        return _Elf(data).info()
    except _FAULTS as error:
        raise VerificationError(f"expected a cubin, got {describe(data)} ({error})") from error


def describe(data: bytes) -> str:
    """What some bytes look like, for a message: "an empty file", "a Git LFS pointer", "an ELF for x86-64" and so on."""
    if not data:
        return "an empty file"
    if data.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a Git LFS pointer (the file itself was never fetched)"
    if data.startswith(b"\x7fELF"):
        return _describe_elf(data)
    head = data[:512].lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if not data.strip(b"\0"):
        return "nothing but zero bytes"
    try:
        data[:512].decode("ascii")
    except UnicodeDecodeError:
        return "no ELF"
    return f"text that begins {data[:32]!r}"


def _describe_elf(data: bytes) -> str:
    if len(data) < _HEADER.size:
        return f"a truncated ELF ({len(data)} bytes)"
    machine = _HEADER.unpack_from(data)[2]
    if machine != _EM_CUDA:
        return f"an ELF for {_MACHINES.get(machine, f'machine {machine}')}, not for CUDA"
    try:
        return f"a CUDA ELF for {_Elf(data).info().arch}"
    except _FAULTS:
        return f"a truncated or damaged CUDA ELF ({len(data)} bytes)"


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


class _Elf:
    """One pass over the file. Any inconsistency surfaces as one of _FAULTS."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._attributes_left = _MAX_ATTRIBUTES
        header = _HEADER.unpack_from(data)
        ident, machine, self._flags = header[0], header[2], header[7]
        section_offset, entry_size, count, names_index = header[6], header[11], header[12], header[13]
        if ident[:6] != b"\x7fELF\x02\x01" or machine != _EM_CUDA or entry_size != _SECTION.size:
            raise ValueError("not a 64-bit little-endian CUDA ELF")
        if count > _MAX_SECTIONS:
            raise ValueError(f"{count} sections, expected at most {_MAX_SECTIONS}")
        self._abi = ident[7]
        raw = [_SECTION.unpack_from(data, section_offset + i * entry_size) for i in range(count)]
        names = _Section("", raw[names_index][1], raw[names_index][4], raw[names_index][5], 0)
        self._sections = [_Section(self._string(names, s[0]), s[1], s[4], s[5], s[6]) for s in raw]
        self._by_name = {section.name: section for section in reversed(self._sections)}
        for section in self._sections:
            if section.kind != _SHT_NOBITS and section.offset + section.size > len(data):
                raise ValueError(f"section {section.name} ends behind the end of the file")
        program_offset, program_entry_size, program_count = header[5], header[9], header[10]
        if program_offset + program_entry_size * program_count > len(data):
            raise ValueError("the program headers end behind the end of the file")

    def info(self) -> CubinInfo:
        return CubinInfo(self._arch(), dict(self._kernels()))

    def _arch(self) -> str:
        """The target in the header's flags, whose layout depends on the ABI in e_ident[EI_OSABI]."""
        if self._abi == 51:  # ABI version 7: sm_90 and before
            number, accelerated = self._flags & 0xFF, self._flags & 0x800
        elif self._abi == 65:  # ABI version 8: sm_100 and later
            number, accelerated = self._flags >> 8 & 0xFF, self._flags & 0x8
        else:
            raise ValueError(f"unknown CUDA ELF ABI {self._abi}")
        return f"sm_{number}{'a' if accelerated else ''}"

    def _kernels(self) -> Iterator[tuple[str, KernelInfo]]:
        table = self._section(".symtab")
        by_symbol: dict[int, dict[int, int]] = defaultdict(dict)
        for code, payload in self._attributes(".nv.info"):
            if code in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
                symbol, value = struct.unpack("<II", payload)
                by_symbol[symbol][code] = value
        strings, seen = self._sections[table.link], set[str]()
        for index in range(table.size // _SYMBOL.size):
            name, kind, other, *_ = _SYMBOL.unpack_from(self._data, table.offset + index * _SYMBOL.size)
            if kind & 0xF == _STT_FUNC and other & _STO_CUDA_ENTRY:
                if len(seen) == _MAX_KERNELS:
                    raise ValueError(f"more than {_MAX_KERNELS} kernels")
                symbol_name = self._string(strings, name)
                if symbol_name in seen:
                    raise ValueError(f"two kernels called {symbol_name!r}")
                seen.add(symbol_name)
                yield symbol_name, self._kernel(symbol_name, by_symbol[index])

    def _kernel(self, symbol: str, attributes: dict[int, int]) -> KernelInfo:
        own = self._by_name.get(f".nv.shared.{symbol}")
        shared = RESERVED_SMEM_BYTES if own is None else own.size
        parameters = {}
        for code, payload in self._attributes(f".nv.info.{symbol}"):
            if code == _KPARAM_INFO:
                _, ordinal, _, packed = struct.unpack("<IHHI", payload)
                parameters[ordinal] = packed >> 18
        return KernelInfo(
            registers=attributes[_REGCOUNT],
            spill_bytes=max(attributes.get(_FRAME_SIZE, 0), attributes.get(_MIN_STACK_SIZE, 0)),
            static_smem_bytes=shared - RESERVED_SMEM_BYTES,
            parameter_bytes=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
        )

    def _attributes(self, section_name: str) -> Iterator[tuple[int, bytes]]:
        """Code and payload of each sized attribute; the others carry their value in place and are not needed."""
        section = self._section(section_name)
        at, end = section.offset, section.offset + section.size
        while at < end:
            self._attributes_left -= 1
            if self._attributes_left < 0:
                raise ValueError(f"more than {_MAX_ATTRIBUTES} attributes")
            form, code, size = struct.unpack_from("<BBH", self._data, at)
            at += 4
            if form == _FORMAT_SIZED:
                yield code, self._data[at : at + size]
                at += size

    def _section(self, name: str) -> _Section:
        found = self._by_name.get(name)
        if found is None:
            raise ValueError(f"no section {name}")
        return found

    def _string(self, table: _Section, at: int) -> str:
        start = table.offset + at
        return self._data[start : self._data.index(b"\0", start, start + _MAX_NAME_BYTES)].decode()
