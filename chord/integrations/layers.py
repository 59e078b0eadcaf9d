"""What a framework's layer of routed experts is made of, and what is said of it in the framework's log."""

from __future__ import annotations

import logging

from chord import _runtime
from chord.w4a16 import WeightShape

_said: set[tuple[str, ...]] = set()


def projections(name: str, experts: int, hidden: int, intermediate: int) -> list[tuple[str, WeightShape]]:
    """("w13", its shape) and ("w2", its shape) of a layer on one GPU. Raises ValueError that names the layer for sizes
    that no kernel takes.
    """
    try:
        w13 = WeightShape(experts, 2 * intermediate, hidden, gated=True)
        return [("w13", w13), ("w2", WeightShape(experts, hidden, intermediate))]
    except ValueError as error:
        raise ValueError(
            f"{name}: {error} (hidden size {hidden}, intermediate size {intermediate} on this GPU, {experts} experts); "
            "another tensor-parallel size or expert parallelism may fit"
        ) from error


def say_once(log: logging.Logger, experts: str, programs: list[str]) -> None:
    """What an operator looks for in the log, once for each set of kernels. experts: the class that launches them."""
    if (experts, *programs) in _said:
        return
    _said.add((experts, *programs))
    registry = _runtime.registry()
    log.info(
        "chord %s: INT4 experts by %s, kernels %s, manifest %s",
        registry.manifest.registry.version,
        experts,
        ", ".join(programs) or "the CPU reference",
        registry.digest[:12],
    )
