"""Files that appear whole or not at all, and the lock that keeps two builds of one tree from doing the same work."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

TEMPORARY = re.compile(r"\..+\.[0-9a-f]+\.tmp")
"""Names of files that are being written, or that a killed writer left."""


def write_atomically(path: Path, data: bytes) -> None:
    """Give `path` new content. Whoever reads it sees the old bytes or the new ones, whenever this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that the kernel releases when its holder ends, in whatever way: nobody waits for a dead process.

    `waiting` is called once if a living process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
