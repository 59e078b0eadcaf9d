"""From named arguments to what a kernel launch takes: one block of memory with the values and their addresses."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chord.registry.arrays import address_of
from chord.registry.driver import Driver
from chord.registry.schema import Arg

_SLOT_BYTES = 8
_FORMATS = {"buffer": "Q", "i32": "i4x", "i64": "q", "f32": "f4x"}
"""struct format of an 8-byte slot, by parameter type; addresses are 64-bit."""

_PLAIN = frozenset({int, float, bool})


class Packed(NamedTuple):
    """`address` points at the kernel's parameter list, and is valid as long as `memory` lives."""

    address: int
    memory: ctypes.Array[ctypes.c_uint64]
    keep: tuple[object, ...]
    """What owns the arrays behind the addresses."""


class Packer:
    """Packs the arguments of one arm. Slots first, then the addresses of the slots."""

    def __init__(self, args: Sequence[Arg]) -> None:
        self._args = tuple(args)
        self._names = tuple(arg.name for arg in args)
        formats = (_FORMATS["buffer" if arg.kind == "buffer" else arg.type] for arg in args)
        self._layout = struct.Struct(f"<{''.join(formats)}{len(args)}Q")
        self._memory = ctypes.c_uint64 * max(2 * len(args), 1)

    def pack(self, arguments: Mapping[str, object], device: int, driver: Driver) -> Packed:
        """Raises ValueError naming each argument that is missing, unknown, of the wrong type or on another device."""
        if len(arguments) != len(self._names):
            raise self._wrong_names(arguments)
        try:
            values = [arguments[name] for name in self._names]
        except KeyError:
            raise self._wrong_names(arguments) from None
        keep: tuple[object, ...] = ()
        if not _PLAIN.issuperset(map(type, values)):
            values, keep = self._unwrap(values, device, driver)
        memory = self._memory()
        first = ctypes.addressof(memory)
        end = first + _SLOT_BYTES * len(values)
        try:
            self._layout.pack_into(memory, 0, *values, *range(first, end, _SLOT_BYTES))
        except (struct.error, OverflowError):
            raise self._wrong_value(values) from None
        return Packed(end, memory, keep)

    def _unwrap(self, values: list[object], device: int, driver: Driver) -> tuple[list[object], tuple[object, ...]]:
        """Replace arrays by their addresses and None by the null address."""
        unwrapped: list[object] = []
        keep: list[object] = []
        faults: list[str] = []
        for arg, value in zip(self._args, values, strict=True):
            if arg.kind != "buffer" or isinstance(value, int):
                unwrapped.append(value)
            elif value is None:
                unwrapped.append(0)
            else:
                try:
                    pointer, owner = address_of(value, arg.type, device, driver)
                except ValueError as error:
                    faults.append(f"{arg.name} {error}")
                else:
                    unwrapped.append(pointer)
                    keep.append(owner)
        if faults:
            raise ValueError("; ".join(faults))
        return unwrapped, tuple(keep)

    def _wrong_names(self, arguments: Mapping[str, object]) -> ValueError:
        missing = ", ".join(name for name in self._names if name not in arguments)
        unknown = ", ".join(str(name) for name in arguments if name not in self._names)
        return ValueError(
            f"expected the arguments {', '.join(self._names)}"
            + (f"; missing {missing}" if missing else "")
            + (f"; unknown {unknown}" if unknown else "")
        )

    def _wrong_value(self, values: Sequence[object]) -> ValueError:
        for arg, value in zip(self._args, values, strict=True):
            kind = "buffer" if arg.kind == "buffer" else arg.type
            try:
                struct.pack(f"<{_FORMATS[kind]}", value)
            except (struct.error, OverflowError):
                expected = "an address" if kind == "buffer" else f"a value that fits {kind}"
                return ValueError(f"{arg.name} = {value!r} ({type(value).__name__}): expected {expected}")
        raise AssertionError("packing failed although every value fits")
