"""What a framework's config says of a projection of routed experts, and whether the kernels serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chord.w4a16.scheme import check_group


def check_projection(
    scheme: Mapping[str, Any] | None, name: str, option: str, default_format: str | None = None
) -> None:
    """Raises ValueError, naming the projection, field and value, for a scheme that is not served.

    scheme: a config group as the framework's compressed-tensors config finds it for `name`; None for weights that are
    not quantised. option: the value of --quantization that chose chord. default_format: of a group that names none.
    """
    if scheme is None:
        raise ValueError(
            f"{name}: its weights are not quantised, --quantization {option} serves routed experts in INT4 alone; "
            "leave the option out for this model"
        )
    weights = scheme.get("weights")
    group = {**scheme, "weights": None if weights is None else dict(weights)}
    check_group({**group, "format": group.get("format") or default_format}, name)
