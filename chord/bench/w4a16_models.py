"""Expert shapes of other models than Kimi K2, as eight GPUs share them: scenarios of `chord bench w4a16`."""

from __future__ import annotations

from typing import NamedTuple

from chord.w4a16 import WeightShape

OTHER_MODELS = "other_models"
"""Stands for all scenarios of this module."""


class Model(NamedTuple):
    """Routed experts of a model; each token goes to eight of them."""

    experts: int
    hidden: int
    intermediate: int


_MODELS = {
    "qwen3_235b": Model(128, 4096, 1536),
    "deepseek_v3": Model(256, 7168, 2048),
    "glm_4_6": Model(160, 5120, 1536),
}
_TOKENS = {"ep8": (16, 256, 1024), "tp8": (32, 2048)}
"""Of this GPU: of a decode step, then of prefill. Each gives eight rows."""


def _shapes(model: Model, split: str) -> dict[str, WeightShape]:
    """Expert parallel over 8: an eighth of the experts; tensor parallel: an eighth of each."""
    share, width = (8, 1) if split == "ep8" else (1, 8)
    experts, intermediate = model.experts // share, model.intermediate // width
    return {
        "gate_up": WeightShape(experts, 2 * intermediate, model.hidden, gated=True),
        "down": WeightShape(experts, model.hidden, intermediate),
    }


SHAPES = {f"{name}_{split}": _shapes(model, split) for name, model in _MODELS.items() for split in _TOKENS}
"""By scenario and projection."""
TOKENS = {scenario: _TOKENS[scenario.rpartition("_")[2]] for scenario in SHAPES}
"""By scenario."""


def expanded(scenarios: set[str]) -> set[str]:
    """The same with OTHER_MODELS replaced by what it stands for."""
    return scenarios - {OTHER_MODELS} | (set(SHAPES) if OTHER_MODELS in scenarios else set())
