"""Verified, ahead-of-time compiled GPU kernels, and the operators over them.

Everything is imported when it is first asked for: `import chord` itself needs nothing but the standard library.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from chord._version import __version__

if TYPE_CHECKING:
    from chord import bench as bench
    from chord import checks as checks
    from chord import errors as errors
    from chord import integrations as integrations
    from chord import registry as registry
    from chord import router as router
    from chord import tune as tune
    from chord import w4a16 as w4a16
    from chord.errors import ChordError as ChordError
    from chord.registry import Kernel as Kernel
    from chord.registry import PreparedLaunch as PreparedLaunch
    from chord.registry import Registry as Registry
    from chord.registry import Selection as Selection
    from chord.router import RoutePlan as RoutePlan
    from chord.router import allocate_route_plan as allocate_route_plan
    from chord.router import fused_router as fused_router
    from chord.router import max_route_blocks as max_route_blocks
    from chord.router import prepare_fused_router as prepare_fused_router
    from chord.router import route_plan as route_plan
    from chord.w4a16 import PackedW4A16 as PackedW4A16
    from chord.w4a16 import W4A16Experts as W4A16Experts
    from chord.w4a16 import moe_w4a16 as moe_w4a16
    from chord.w4a16 import moe_w4a16_combine as moe_w4a16_combine
    from chord.w4a16 import moe_w4a16_contiguous as moe_w4a16_contiguous
    from chord.w4a16 import moe_w4a16_masked as moe_w4a16_masked
    from chord.w4a16 import pack_w4a16 as pack_w4a16
    from chord.w4a16 import prepare_moe_w4a16 as prepare_moe_w4a16
    from chord.w4a16 import prepare_moe_w4a16_combine as prepare_moe_w4a16_combine
    from chord.w4a16 import prepare_moe_w4a16_contiguous as prepare_moe_w4a16_contiguous
    from chord.w4a16 import prepare_moe_w4a16_masked as prepare_moe_w4a16_masked
    from chord.w4a16 import route_intervals as route_intervals
    from chord.w4a16 import unpack_w4a16 as unpack_w4a16

_HOMES = {
    "ChordError": "chord.errors",
    "Kernel": "chord.registry",
    "PackedW4A16": "chord.w4a16",
    "PreparedLaunch": "chord.registry",
    "Registry": "chord.registry",
    "RoutePlan": "chord.router",
    "Selection": "chord.registry",
    "W4A16Experts": "chord.w4a16",
    "allocate_route_plan": "chord.router",
    "fused_router": "chord.router",
    "max_route_blocks": "chord.router",
    "moe_w4a16": "chord.w4a16",
    "moe_w4a16_combine": "chord.w4a16",
    "moe_w4a16_contiguous": "chord.w4a16",
    "moe_w4a16_masked": "chord.w4a16",
    "pack_w4a16": "chord.w4a16",
    "prepare_fused_router": "chord.router",
    "prepare_moe_w4a16": "chord.w4a16",
    "prepare_moe_w4a16_combine": "chord.w4a16",
    "prepare_moe_w4a16_contiguous": "chord.w4a16",
    "prepare_moe_w4a16_masked": "chord.w4a16",
    "route_intervals": "chord.w4a16",
    "route_plan": "chord.router",
    "unpack_w4a16": "chord.w4a16",
}
"""Where each public name is defined."""

_MODULES = frozenset(
    ["bench", "build", "checks", "cli", "errors", "integrations", "registry", "router", "tune", "w4a16"]
)
_OWN = _MODULES | {"__init__", "__main__", "_data", "_paths", "_runtime", "_settings", "_version"}
"""What may lie in this folder. Another public project has the import root `chord`, too."""


def __getattr__(name: str) -> object:
    home = f"chord.{name}" if name in _MODULES else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'chord' has no attribute {name!r}")
    try:
        module = import_module(home)
        value: object = module if name in _MODULES else getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"chord.{name} needs torch: pip install 'chord-registry[torch]'", name="torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


def _refuse_foreign_files(folder: Path) -> None:
    """Two distributions that share an import root overwrite each other's files: better no chord than a mixed one."""
    foreign = sorted(
        entry.name for entry in folder.iterdir() if _is_code(entry) and entry.name.split(".")[0] not in _OWN
    )
    if foreign:
        raise ImportError(
            f"{folder} holds files of another distribution ({', '.join(foreign)}): expected chord-registry alone; "
            "uninstall the other project whose import root is chord, then reinstall chord-registry",
            name="chord",
        )


def _is_code(entry: Path) -> bool:
    """A module, or a folder with modules in it; left-over empty folders do no harm."""
    if entry.suffix in (".py", ".pyd", ".so"):
        return True
    return entry.is_dir() and entry.name != "__pycache__" and any(entry.glob("*.py"))


_refuse_foreign_files(Path(__file__).parent)

__all__ = ["__version__", *_HOMES]
