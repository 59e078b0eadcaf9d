"""Types of numbers by name. vLLM uses them as keys of tables, and reads their width."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DataType:
    """One type; equal and hashed by its name."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def num_bits(self) -> int:
        found = re.search(r"\d+", self.name)
        assert found is not None  # noqa: S101 - every name has its width
        return int(found[0])

    @property
    def is_floating_point_type(self) -> bool:
        return "float" in self.name

    @property
    def is_integer_type(self) -> bool:
        return not self.is_floating_point_type

    @classmethod
    def from_any(cls, dtype: DataType | torch.dtype | str) -> DataType:
        """Raises ValueError for what is no type of this module."""
        name = str(dtype).removeprefix("torch.").replace("_", "").removesuffix("fn")
        found = globals().get(name)
        if not isinstance(found, cls):
            raise ValueError(f"dtype: expected a name such as {', '.join(NAMES[:4])}, got {dtype!r}")
        return found

    from_str = from_any


NAMES = (
    "float16", "bfloat16", "float32",
    "float4e0m3", "float4e2m1", "float6e2m3", "float6e3m2", "float8e3m4", "float8e4m3", "float8e5m2", "float8e8m0",
    "int2", "int3", "int4", "int5", "int6", "int7", "int8",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "uint8",
)  # fmt: skip
globals().update({name: DataType(name) for name in NAMES})

__all__ = ["DataType", *NAMES]


def __getattr__(name: str) -> DataType:
    raise AttributeError(f"module {__name__!r} has no type {name!r}; it has {', '.join(NAMES)}")
