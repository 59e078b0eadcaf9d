"""The compiling process: reads requests from standard input, writes results to standard output, ends with its parent.

A message is its length (8 bytes, little-endian) and that many bytes of MessagePack. The first message in is the pin,
and the first one out says whether the compiler could be loaded. When the parent is gone, however it went, standard
input ends and so does this process: nothing is left behind that waits or holds a lock.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import IO

import msgspec

from chord.build.nvrtc import Nvrtc, Request
from chord.build.toolchain import ToolchainPin
from chord.errors import ToolchainError

_LENGTH_BYTES = 8


def send(stream: IO[bytes], message: object) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read one message, undecoded; None when the other side is gone."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to us too; our parent decides
    requests = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the compiler prints must not end up among the results
    pin = receive(requests)
    if pin is None:
        return
    try:
        compiler = Nvrtc.open(msgspec.msgpack.decode(pin, type=ToolchainPin))
    except ToolchainError as error:
        send(results, str(error))
        return
    send(results, None)
    with suppress(BrokenPipeError):  # the parent was killed during a compilation
        while (data := receive(requests)) is not None:
            send(results, compiler.compile(msgspec.msgpack.decode(data, type=Request)))
