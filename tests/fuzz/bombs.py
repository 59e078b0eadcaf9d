"""Inputs that are meant to hurt: small or large files that ask for all of the memory, for minutes, or for code to run.

`python tests/fuzz/bombs.py NAME` throws one at its reader, and prints what that said and what it cost.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import toytree
from fuzz.targets import TARGETS, try_one

_MANY = 4000
_BASE = 64 + 64 * _MANY
"""Where the body of an ELF with _MANY sections begins."""
_NAMES = b"\0.symtab\0.nv.info\0.nv.info.k\0" + b"n" * 4000 + b"\0"


def _section(name: int, kind: int, offset: int, size: int) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0)


def _elf(sections: bytes, count: int, body: bytes) -> bytes:
    ident = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, 190, 1, 0, 0, 64, 0x5A0000, 64, 0, 0, 64, count, 0)
    return header + sections + body


def _manifest(edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """A good manifest, changed: `edit` gets it and its operator."""
    raw = json.loads(TARGETS["manifest"].seeds()[0])
    edit(raw, raw["operators"]["toy"])
    return json.dumps(raw).encode()


def _many_choices(raw: dict[str, Any], toy: dict[str, Any]) -> None:
    choices = [[n] for n in range(50)]
    toy["axes"] = [{"keys": [f"k{i}"], "choices": choices, "first": 0, "last": -1, "step": 1} for i in range(30)]


def _many_cells(raw: dict[str, Any], toy: dict[str, Any]) -> None:
    toy["axes"] = [{"keys": [k], "choices": [], "first": 0, "last": 10**9, "step": 1} for k in "abcdef"]
    toy["routes"] = {
        "sm_90a": [{"where": {k: [i, i] for k in "abcdef"}, "program": "toy.many"} for i in range(0, 300 * 2, 2)]
    }


def _huge_cubin(raw: dict[str, Any], toy: dict[str, Any]) -> None:
    for program in toy["programs"].values():
        for build in program["builds"].values():
            build["size_bytes"] = 10**15


def _late_fault(raw: dict[str, Any], toy: dict[str, Any]) -> None:
    raw["sources"] = {f"f{i}": "0" * 64 for i in range(300_000)}
    toy["notes"] = {"x": 1}


def _table(expression: str) -> bytes:
    """The toy's table with a constant of that expression."""
    old = 'threads = "width * lanes // 2"'
    return toytree.TABLE.replace(old, "threads = " + json.dumps(expression)).encode()


def _dotted(lines: int) -> bytes:
    return b"\n".join(b".".join(b"k%d" % (40 * line + i) for i in range(40)) + b"=1" for line in range(lines))


def _symbols(count: int) -> bytes:
    """The same kernel `count` times."""
    register_count = struct.pack("<BBHII", 4, 0x2F, 8, 0, 32)
    body = _NAMES + register_count
    sections = _section(0, 3, _BASE, len(_NAMES)) + _section(1, 2, _BASE + len(body), 24 * count)
    sections += _section(9, 1, _BASE + len(_NAMES), len(register_count))
    symbol = struct.pack("<IBBHQQ", 27, 2, 16, 1, 0, 0)
    return _elf(sections + _section(18, 1, _BASE, 0) * (_MANY - 3), _MANY, body + symbol * count)


_DEEP = 5_000_000
BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "deep JSON": ("manifest", lambda: b"[" * _DEEP),
    "deep JSON behind a version": ("manifest", lambda: b'{"schema_version":1,"x":' + b"[" * _DEEP),
    "deep lock": ("lock", lambda: b'{"cubins":' + b'{"a":' * 1_000_000),
    "deep receipt": ("receipt", lambda: b'{"checks":{"a":' + b"[" * _DEEP),
    "deep envelope": ("envelope", lambda: b'{"payload":"","payloadType":"","signatures":[],"x":' + b"[" * _DEEP),
    "30 axes of 50 choices": ("manifest", lambda: _manifest(_many_choices)),
    "routes that cut six axes 300 times": ("manifest", lambda: _manifest(_many_cells)),
    "a cubin of a petabyte": ("manifest", lambda: _manifest(_huge_cubin)),
    "a fault behind 300,000 entries": ("manifest", lambda: _manifest(_late_fault)),
    "deep TOML": ("table", lambda: b"a=" + b"[" * 400_000),
    "deep TOML tables": ("table", lambda: b"a=" + b"{a=" * 200_000),
    "a dotted key of 100,000 parts": ("table", lambda: b"a." * 100_000 + b"b=1"),
    "3,000 dotted keys": ("table", lambda: _dotted(3000)),
    "a table of 40 MB": ("table", lambda: b"#" * (40 << 20)),
    "half a million digits": ("table", lambda: b"abi_version = " + b"9" * 500_000),
    "a power": ("table", lambda: _table("9 ** 9 ** 9")),
    "a repetition": ("table", lambda: _table("'x' * 9999999999")),
    "a range": ("table", lambda: _table("range(99999) | list | length")),
    "a way out of the sandbox": ("table", lambda: _table("''.__class__.__mro__[1].__subclasses__()")),
    "a wide format": ("table", lambda: _table("'%9999999999d' % 1")),
    "deep brackets": ("table", lambda: _table("(" * 180 + "1" + ")" * 180)),
    "160,000 programs": (
        "table", lambda: toytree.TABLE.replace("num_tokens = [1, 2]", f"num_tokens = {[1] * 40_000}").encode()
    ),
    "65,535 sections": ("cubin", lambda: _elf(_section(0, 3, 0, 0) * 1000, 65535, b"")),
    "names without an end": ("cubin", lambda: _elf(_section(0, 3, _BASE, 9) * _MANY, _MANY, b"n" * (8 << 20))),
    "a symbol table of 2^63 bytes": (
        "cubin",
        lambda: _elf(_section(0, 3, _BASE, 99) + _section(1, 8, 0, 2**63) * (_MANY - 1), _MANY, _NAMES),
    ),
    "a million kernels": ("cubin", lambda: _symbols(1 << 20)),
    "offsets beyond 2^63": ("cubin", lambda: _elf(_section(0, 3, 2**63, 2**64 - 1) * _MANY, _MANY, _NAMES)),
}  # fmt: skip
"""The reader that each is for (a target's name), and the bytes."""


def main() -> None:
    """Throw one, in a process of its own, so that what it costs can be told."""
    target, make = BOMBS[sys.argv[1]]
    TARGETS[target].seeds()  # what the reader imports is not the bomb's cost
    data = make()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    said = try_one(target, data)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(json.dumps({"said": said[:300], "seconds": time.process_time() - started, "mebibytes": used}))


if __name__ == "__main__":
    main()
