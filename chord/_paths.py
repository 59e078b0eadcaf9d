"""Where chord's data lies: under chord/_data in a wheel, in the repository's root in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """The folder with registry/, templates/, build/ and manifest.json."""
    packaged = PACKAGE / "_data"
    return packaged if packaged.is_dir() else PACKAGE.parent


def registry_dir() -> Path:
    """The operators' tables, one TOML file each."""
    return data_root() / "registry"


def store_of(root: Path) -> Path:
    """The cubin store of the registry in `root`: build/out/cubins as `chord build` leaves it, else cubins."""
    built = root / "build" / "out" / "cubins"
    flat = root / "cubins"
    return flat if _is_folder(flat) and not _is_folder(built) else built


def _is_folder(path: Path) -> bool:
    """Path.is_dir raises where it may not look."""
    try:
        return path.is_dir()
    except OSError:
        return False
