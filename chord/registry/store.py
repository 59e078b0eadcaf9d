"""A folder of cubins named by their SHA-256: `<sha256>.cubin`. Written atomically, read only with the hash checked."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from chord.errors import MissingCubinError, VerificationError
from chord.registry.cubin import describe
from chord.registry.files import TEMPORARY, write_atomically
from chord.registry.schema import Manifest

SUFFIX = ".cubin"


class Store:
    """Cubins in the folder `root`, which need not exist until something is written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path_of(self, sha256: str) -> Path:
        """Where the cubin of that hash lies. Raises ValueError for anything but 64 lower-case hex digits."""
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"{sha256!r} is not a SHA-256: expected 64 lower-case hex digits")
        return self.root / f"{sha256}{SUFFIX}"

    def read_verified(self, sha256: str, size_bytes: int) -> bytes:
        """The cubin's bytes, of exactly that size and hash.

        Raises MissingCubinError when there is no such file, VerificationError when it is anything else than expected.
        """
        path = self.path_of(sha256)
        data, size = self._read(path, size_bytes)
        if len(data) != size_bytes:
            raise VerificationError(f"{path}: expected {size_bytes} bytes, found {size}: {describe(data)}; {_REPAIR}")
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise VerificationError(f"{path}: expected SHA-256 {sha256}, found {found}: {describe(data)}; {_REPAIR}")
        return data

    def write(self, data: bytes) -> str:
        """Add a cubin and return its hash. Any number of writers may do so at once, and may be killed at any time."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.path_of(sha256)
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            write_atomically(path, data)
        return sha256

    def listing(self) -> list[Path]:
        """Every entry of the folder but the temporary files of writers, sorted; empty when there is no folder.

        Raises VerificationError for a folder that cannot be listed: what lies in it is unknown then.
        """
        try:
            return sorted(path for path in self.root.iterdir() if not TEMPORARY.fullmatch(path.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            why = f"expected a folder of cubins, cannot list it: {error.strerror}"
            raise VerificationError(f"{self.root}: {why}") from error

    def unlisted(self, manifest: Manifest) -> list[Path]:
        """Entries that the manifest does not name."""
        named = {
            f"{build.cubin_sha256}{SUFFIX}"
            for operator in manifest.operators.values()
            for program in operator.programs.values()
            for build in program.builds.values()
        }
        return [path for path in self.listing() if path.name not in named]

    def _read(self, path: Path, size_bytes: int) -> tuple[bytes, int]:
        """At most one byte more than expected, so that a huge file costs nothing; and the size of the file."""
        try:
            target = path.resolve(strict=True)
            if target.parent != self.root.resolve():
                raise VerificationError(
                    f"{path}: a link out of the store, to {target}; expected the cubin itself; {_REPAIR}"
                )
            if not stat.S_ISREG(target.stat().st_mode):
                raise VerificationError(f"{path}: expected a file, found something else; {_REPAIR}")
            descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not even a pipe put there since
            with os.fdopen(descriptor, "rb") as file:
                return file.read(size_bytes + 1), os.fstat(descriptor).st_size
        except FileNotFoundError:
            raise MissingCubinError(f"{path}: expected {size_bytes} bytes, found no file; {_REPAIR}") from None
        except (OSError, RuntimeError) as error:  # the latter: a link to itself, before Python 3.13
            why = error.strerror if isinstance(error, OSError) else "links that lead in a circle"
            raise VerificationError(f"{path}: expected {size_bytes} bytes, cannot read it: {why}") from error


_REPAIR = "restore it with `chord build`, or reinstall the package"
