"""What the stand-in for humming does not serve, each refused by name with a way out."""

from __future__ import annotations

from typing import Any, NoReturn

WAY_OUT = (
    "chord's stand-in for humming serves experts in symmetric INT4, groups of 32, pack-quantized, on bfloat16 "
    "activations. Serve this model with --moe-backend marlin --linear-backend marlin, or switch the stand-in off: "
    "unset CHORD_HUMMING and take its folder off PYTHONPATH"
)


def refuse(what: str) -> NoReturn:
    """Raises NotImplementedError that names `what`."""
    raise NotImplementedError(f"{what} is not served; {WAY_OUT}")


def unserved(name: str, title: str) -> type:
    """A class of the surface that only says, whenever it is made, that it is not served."""

    def refusing(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - called like anything
        refuse(title)

    members = {"__init__": refusing, "from_config": staticmethod(refusing), "__doc__": f"Not served: {title}."}
    return type(name, (), members)
