"""What a checkpoint says about its quantisation, and whether it is the one scheme that the kernels serve: symmetric
INT4 codes in groups of 32 along K, bfloat16 scales, activations left alone. Everything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]

_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (32,),
    "actorder": (None, False),
    "dynamic": (None, False),
}
"""Field of a weight scheme -> values that are served."""
_REFUSED_TENSORS = {
    "weight_zero_point": "zero points",
    "qzeros": "zero points",
    "weight_g_idx": "act order",
    "g_idx": "act order",
    "input_scale": "quantised inputs",
    "input_zero_point": "quantised inputs",
    "weight_global_scale": "scales of scales",
    "qweight": "GPTQ's and AWQ's packing",
    "bias": "biases",
}
"""Last part of a tensor's name -> what it would mean."""
_STACKS = ("w13_", "w2_")
"""What comes before that in a checkpoint whose experts are stacked."""


def quantization_of(config: Fields) -> Fields | None:
    """The quantization_config of a model's config.json, wherever multi-modal models keep it."""
    for holder in (config, _object("text_config", config.get("text_config"))):
        for name in ("quantization_config", "compression_config"):
            if holder.get(name):
                return _object(name, holder[name])
    return None


def check_scheme(quantization: Fields, module: str) -> None:
    """Raises ValueError, naming field, value and what is allowed, unless `module` is quantised as the kernels need."""
    _expect(module, "quant_method", quantization.get("quant_method"), ("compressed-tensors",))
    if any(_matches(pattern, module) for pattern in _texts("ignore", quantization.get("ignore"))):
        raise ValueError(f"{module}: its weights are not quantised (quantization_config's ignore names it)")
    group = _group_of(quantization, module)
    check_group({**group, "format": group.get("format") or quantization.get("format")}, module)


def check_group(group: Fields, module: str) -> None:
    """The same for one config group: its `format`, `weights` and activations, however they were read."""
    _expect(module, "format", group.get("format"), ("pack-quantized",))
    if group.get("weights") is None:
        raise ValueError(f"{module}: its weights are not quantised (the config group has none)")
    weights = _object("weights", group["weights"])
    for field, allowed in _WEIGHTS.items():
        _expect(module, f"weights.{field}", weights.get(field), allowed)
    for field in ("input_activations", "output_activations"):
        _expect(module, field, group.get(field), (None,))


def check_tensor_names(names: Iterable[str]) -> None:
    """Raises ValueError for the first tensor that only another scheme has."""
    for name in names:
        last = name.rpartition(".")[2]
        stacked = next((last.removeprefix(stack) for stack in _STACKS if last.startswith(stack)), last)
        meaning = _REFUSED_TENSORS.get(stacked)
        if meaning is not None:
            raise ValueError(
                f"{name}: {meaning} are not served; expected symmetric INT4 codes in groups of 32 with bfloat16 scales"
            )


def _group_of(quantization: Fields, module: str) -> Fields:
    """The config group of a module: one that names it goes before one for all linear layers."""
    groups = _object("config_groups", quantization.get("config_groups")).items()
    targets = [
        (_object(name, group), _texts(f"{name}.targets", _object(name, group).get("targets"))) for name, group in groups
    ]
    named = [group for group, texts in targets if any(_matches(target, module) for target in texts)]
    linear = [group for group, texts in targets if "Linear" in texts]
    if not named and not linear:
        raise ValueError(f"{module}: its weights are not quantised (no config group has it among its targets)")
    return (named or linear)[0]


def _matches(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as error:
        raise ValueError(
            f"quantization_config: expected a regular expression behind re:, got {pattern!r} ({error})"
        ) from error


def _object(name: str, value: object) -> Fields:
    """A mapping, empty for None. Raises ValueError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config: expected an object as {name}, got {value!r:.80}")
    return value


def _texts(name: str, value: object) -> Sequence[str]:
    """A list of texts, empty for None. Raises ValueError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"quantization_config: expected a list of texts as {name}, got {value!r:.80}")
    return value


def _expect(module: str, field: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        wanted = " or ".join(repr(one) for one in allowed)
        raise ValueError(f"{module}: quantization_config has {field} = {value!r}, chord serves {wanted} alone")
