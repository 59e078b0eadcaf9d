"""An import hook for tests of frameworks: named modules, which are not installed here, are stood in for."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Callable, Sequence


class LeaveOut(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the names and all below them; `make` makes a module of a name."""

    def __init__(self, names: Sequence[str], make: Callable[[str], types.ModuleType]) -> None:
        self._names = names
        self._make = make

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == one or name.startswith(f"{one}.") for one in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._make(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
