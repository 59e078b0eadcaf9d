"""Experts of a checkpoint in safetensors files, read one at a time. Needs the optional package safetensors.

Three forms are understood, each with codes as int32 words of eight (`weight_packed`, compressed-tensors'
pack-quantized) or as one int32 0..15 each (`weight`), and bfloat16 scales (`weight_scale`):

    <prefix>.<expert>.gate_proj.weight_packed    [I, H / 8]; up_proj likewise, down_proj [H, I / 8]
    <prefix>.<expert>.w1.weight_packed           the same with the names w1, w3, w2
    <prefix>.w13_weight_packed                   [E, 2 I, H / 8], gate rows first; w2_weight_packed [E, H, I / 8]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chord.w4a16.layout import CODES_PER_WORD, SCALE_GROUP
from chord.w4a16.scheme import check_scheme, check_tensor_names, quantization_of

PROJECTION_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
INDEX = "model.safetensors.index.json"

_CODES = ("weight_packed", "weight")


class Part(NamedTuple):
    """One projection of one expert: codes int32 [N, K / 8] or [N, K], scale bfloat16 [N, K / 32]."""

    codes: torch.Tensor
    scale: torch.Tensor


class Shard(NamedTuple):
    """Which of `size` equal shares of the intermediate features are read."""

    rank: int = 0
    size: int = 1

    def part(self, length: int, what: str) -> slice:
        """The share of an axis. Raises ValueError when it cannot be cut evenly."""
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"tp_rank, tp_size: expected 0 <= rank < size, got {self.rank} of {self.size}")
        if length % self.size:
            raise ValueError(f"tp_size: {what} has {length} entries, which {self.size} GPUs cannot share evenly")
        width = length // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


WHOLE = Shard()


class Tensors:
    """All tensors of a checkpoint: a folder (with an index file, or of one or more files) or one file."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            if error.name != "safetensors":
                raise
            message = "loading checkpoints needs safetensors: pip install 'chord-registry[safetensors]'"
            raise ImportError(message, name="safetensors") from error
        self._open: Callable[..., Any] = safe_open
        self._unreadable: tuple[type[Exception], ...] = (SafetensorError, OSError)
        self._handles: dict[Path, Any] = {}
        self.path = path
        self._homes = dict(self._located(path))

    @property
    def names(self) -> list[str]:
        return sorted(self._homes)

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def slice_of(self, name: str) -> Any:  # noqa: ANN401 - safetensors' PySafeSlice
        """A tensor that is not read yet: it has get_shape, get_dtype and indexing, which reads."""
        if name not in self._homes:
            raise ValueError(f"{self.path}: expected a tensor {name}, found none")
        home = self._homes[name]
        try:
            return self._handle(home).get_slice(name)
        except self._unreadable as error:
            raise ValueError(f"{home}: expected a tensor {name} in it, as {INDEX} says, got: {error}") from error

    def config(self) -> dict[str, Any] | None:
        """The model's config.json beside the tensors, where there is one."""
        folder = self.path if self.path.is_dir() else self.path.parent
        found = folder / "config.json"
        return _read_json(found) if found.is_file() else None

    def _located(self, path: Path) -> Iterator[tuple[str, Path]]:
        if path.is_dir() and (path / INDEX).is_file():
            names = _read_json(path / INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(_is_file_name(file) for file in names.values()):
                raise ValueError(f"{path / INDEX}: expected a weight_map from tensors to names of files beside it")
            yield from ((name, path / file) for name, file in names.items())
            return
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ValueError(f"{path}: expected a safetensors file, or a folder that holds some")
        for file in files:
            yield from ((name, file) for name in self._handle(file).keys())  # noqa: SIM118 - not a mapping

    def _handle(self, file: Path) -> Any:  # noqa: ANN401
        if file not in self._handles:
            try:
                self._handles[file] = self._open(file, framework="pt", device="cpu")
            except self._unreadable as error:
                raise ValueError(f"{file}: expected a file that safetensors can read, got: {error}") from error
        return self._handles[file]


class ExpertReader:
    """Reads single experts of one layer. `num_experts` is how many the checkpoint has."""

    def __init__(self, path: Path | str, prefix: str, shard: Shard = WHOLE) -> None:
        self._tensors = Tensors(Path(path))
        self._prefix = prefix.rstrip(".")
        self._shard = shard
        names = [name for name in self._tensors.names if name.startswith(f"{self._prefix}.")]
        check_tensor_names(names)
        ids = {int(found[1]) for name in names if (found := re.match(r"(\d+)\.", name[len(self._prefix) + 1 :]))}
        self._stacked = not ids
        self._projections = ("w13", "w13", "w2") if self._stacked else self._projection_names(names)
        codes, _ = self._slices(0, self._projections[2])
        self.num_experts = codes.get_shape()[0] if self._stacked else len(ids)
        if not self._stacked and ids != set(range(self.num_experts)):
            raise ValueError(f"{self._prefix}: expected experts 0 to {max(ids)}, got {len(ids)} of them")
        config = self._tensors.config()
        quantization = None if config is None else quantization_of(config)
        if quantization is not None:
            modules = [self._prefix] if self._stacked else [f"{self._prefix}.0.{name}" for name in self._projections]
            for module in modules:
                check_scheme(quantization, module)

    def w13(self, expert: int) -> Part:
        """Gate rows, then up rows: [2 I, H]."""
        gate, up, _ = self._projections
        if self._stacked:
            return self._read(expert, gate, rows="halves")
        first, second = (self._read(expert, name, rows="share") for name in (gate, up))
        sizes = [[list(tensor.shape) for tensor in part] for part in (first, second)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{self._prefix}.{expert}: expected {gate} and {up} of one size, got codes and scales {sizes[0]} and "
                f"{sizes[1]}"
            )
        return Part(*(torch.cat(pair) for pair in zip(first, second, strict=True)))

    def w2(self, expert: int) -> Part:
        """[H, I]."""
        return self._read(expert, self._projections[2], rows="all")

    def _projection_names(self, names: list[str]) -> tuple[str, str, str]:
        for candidates in PROJECTION_NAMES:
            if any(name.startswith(f"{self._prefix}.0.{candidates[0]}.") for name in names):
                return candidates
        wanted = " or ".join("/".join(candidates) for candidates in PROJECTION_NAMES)
        raise ValueError(f"{self._prefix}.0: expected projections {wanted}, got {names[:3]}")

    def _slices(self, expert: int, projection: str) -> tuple[Any, Any]:
        """(codes, scales) of a projection, not read yet; types checked."""
        stem = f"{self._prefix}.{projection}_" if self._stacked else f"{self._prefix}.{expert}.{projection}."
        for kind in _CODES:
            if f"{stem}{kind}" in self._tensors:
                codes = self._tensors.slice_of(f"{stem}{kind}")
                scale = self._tensors.slice_of(f"{stem}weight_scale")
                self._check_ranks(f"{stem}{kind}", expert, codes.get_shape(), scale.get_shape())
                _check_dtype(f"{stem}{kind}", codes, "I32", "int32 codes")
                _check_dtype(f"{stem}weight_scale", scale, "BF16", "bfloat16 scales")
                _check_group(f"{stem}{kind}", codes.get_shape(), scale.get_shape(), packed=kind == "weight_packed")
                self._check_stated_shape(
                    f"{stem}weight_shape", [scale.get_shape()[-2], scale.get_shape()[-1] * SCALE_GROUP]
                )
                return codes, scale
        raise ValueError(f"{self._tensors.path}: expected a tensor {stem}weight_packed or {stem}weight, found neither")

    def _check_ranks(self, name: str, expert: int, *shapes: list[int]) -> None:
        wanted, rank = ("[experts, outputs, k]", 3) if self._stacked else ("[outputs, k]", 2)
        for shape in shapes:
            if len(shape) != rank or (self._stacked and expert >= shape[0]):
                several = f" with at least {expert + 1} experts" if self._stacked else ""
                raise ValueError(f"{name} and its scales: expected {wanted}{several}, got {shape}")

    def _check_stated_shape(self, name: str, found: list[int]) -> None:
        if name in self._tensors:
            stated = self._tensors.slice_of(name)[:].tolist()
            if stated != found:
                raise ValueError(f"{name}: expected {found} as codes and scales have it, got {stated}")

    def _read(self, expert: int, projection: str, *, rows: str) -> Part:
        """rows: a "share" of them, that share of both "halves", or "all" with the share taken along K."""
        slices = self._slices(expert, projection)
        return Part(*(self._cut(tensor, expert, f"{projection} of expert {expert}", rows) for tensor in slices))

    def _cut(self, tensor: Any, expert: int, what: str, rows: str) -> torch.Tensor:  # noqa: ANN401
        height, width = tensor.get_shape()[-2:]
        lead = (slice(expert, expert + 1),) if self._stacked else ()
        if rows == "all":
            read: torch.Tensor = tensor[(*lead, slice(None), self._shard.part(width, what))]
        elif rows == "share":
            read = tensor[(*lead, self._shard.part(height, what), slice(None))]
        else:
            if height % 2:
                raise ValueError(f"{what}: expected as many gate rows as up rows, got {height} in all")
            share = self._shard.part(height // 2, what)
            up = slice(share.start + height // 2, share.stop + height // 2)
            read = torch.cat([tensor[(*lead, half, slice(None))] for half in (share, up)], dim=-2)
        return read.reshape(read.shape[-2:]).contiguous()


def _read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError for anything but an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _is_file_name(value: object) -> bool:
    """Whether a value names a file of the folder that it stands in, and nothing outside."""
    return isinstance(value, str) and value not in ("", ".", "..") and "\0" not in value and Path(value).name == value


def _check_dtype(name: str, tensor: Any, wanted: str, what: str) -> None:  # noqa: ANN401
    found = tensor.get_dtype()
    if found != wanted:
        raise ValueError(f"{name}: expected {what} ({wanted}), got {found}; other types are not served")


def _check_group(name: str, codes: list[int], scale: list[int], *, packed: bool) -> None:
    k = codes[-1] * CODES_PER_WORD if packed else codes[-1]
    if codes[:-1] != scale[:-1] or scale[-1] * SCALE_GROUP != k:
        group = f"groups of {k // scale[-1]}" if scale[-1] and codes[:-1] == scale[:-1] else f"scales {scale}"
        raise ValueError(f"{name}: expected one scale for {SCALE_GROUP} codes of a row, got {group} for k = {k}")
