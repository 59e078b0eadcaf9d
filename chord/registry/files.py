"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
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
    folder = os.open(path.parent, os.O_RDONLY)  # the name is to outlive a loss of power, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
