"""Where a build reads and writes: the folders of one checkout (or of one unpacked source distribution)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chord import _paths
from chord.errors import ChordError, ManifestError
from chord.registry.decoding import MANIFEST_BYTES, read_bounded


@dataclass(frozen=True)
class Tree:
    """The data folders under one root. Sources are only read, everything that is made lies under `out`."""

    root: Path
    out_dir: Path | None = None
    """Instead of <root>/build/out; the manifest stays in the root."""

    @classmethod
    def default(cls) -> Tree:
        """The tree that this code belongs to: the checkout, or the data of an installed package."""
        return cls(_paths.data_root())

    @property
    def registry(self) -> Path:
        """The operators' tables and registry.toml."""
        return self.root / "registry"

    @property
    def templates(self) -> Path:
        """The templates, <operator>/<arm>.cu.j2."""
        return self.root / "templates"

    @property
    def include(self) -> Path:
        """The only folder in which headers are looked for."""
        return self.templates / "include"

    @property
    def toolchain(self) -> Path:
        """The compiler's pin."""
        return self.root / "build" / "toolchain.toml"

    @property
    def manifest(self) -> Path:
        """The generated lock file to the tables."""
        return self.root / "manifest.json"

    def manifest_bytes(self) -> bytes:
        """The manifest as it lies there. Raises FileNotFoundError, ManifestError for what cannot be one."""
        try:
            return read_bounded(self.manifest, MANIFEST_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ManifestError(f"{self.manifest}: cannot be read: {error.strerror}") from error

    @property
    def out(self) -> Path:
        """Everything that a build makes, but the manifest."""
        return self.out_dir or self.root / "build" / "out"

    @property
    def store(self) -> Path:
        """Published cubins by hash: exactly those that the manifest names."""
        return self.out / "cubins"

    @property
    def work(self) -> Path:
        """Finished cubins by closure, published or not: what an incremental build starts from."""
        return self.out / "work"

    @property
    def failed(self) -> Path:
        """Rendered sources of the last build's failures, for reading."""
        return self.out / "failed"

    def require_sources(self) -> None:
        """Raise ChordError when there is nothing to build from, such as in a folder of manifest and cubins alone."""
        if not self.toolchain.is_file():
            raise ChordError(f"{self.root} holds no sources: expected {self.toolchain}, tables and templates")

    def require_checkout(self) -> None:
        """Raise ChordError when the tree is an installed package's: its manifest and store are not ours to change."""
        if self.root == _paths.PACKAGE / "_data":
            raise ChordError(
                f"{self.root} belongs to an installed package: expected a checkout of the sources; "
                "build there, or use `chord verify --rebuild` to compare this package with its own sources"
            )
