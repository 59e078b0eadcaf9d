"""What exists, and running it: manifest, lookup, store, verification, loading and launching.

No torch, no compiler, and nothing else of chord but errors, paths and settings. Only `load` and `preload` touch CUDA.
"""

from chord.registry.facade import Registry, Selection
from chord.registry.launch import Kernel, PreparedLaunch
from chord.registry.verify import Finding, Report

__all__ = ["Finding", "Kernel", "PreparedLaunch", "Registry", "Report", "Selection"]
