"""Peers of the router, measured in the same run: SGLang's kernels, from a folder the user prepared, and plain torch.

No peer's code is part of this project. The folder holds `sgl/{route,align}.cu` with their headers (units that export
one function each through tvm_ffi), `whl/apache_tvm_ffi-*.whl` unless tvm_ffi is installed, and may say its release in
`sgl/VERSION`.
"""

from __future__ import annotations

import importlib
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chord.checks.inputs import RouterCase
from chord.router import max_route_blocks

_UNITS = ("route", "align")


class SglangRouter:
    """SGLang's router: one selection kernel and two for the plan. Compiled with nvcc when made, or RuntimeError."""

    def __init__(self, folder: Path) -> None:
        note = folder / "sgl" / "VERSION"
        self.version = note.read_text(encoding="utf-8").strip() if note.is_file() else "unknown"
        self._ffi = _tvm_ffi(folder)
        build = Path(tempfile.mkdtemp(prefix="chord-peers-"))
        include = Path(self._ffi.__file__).parent / "include"
        jobs = {unit: _compile(folder / "sgl", unit, include, build / f"{unit}.so") for unit in _UNITS}
        for unit, job in jobs.items():
            log = job.communicate()[0]
            if job.returncode:
                raise RuntimeError(f"nvcc failed on {folder}/sgl/{unit}.cu:\n{log}")
        self._modules = {unit: self._ffi.load_module(str(build / f"{unit}.so")) for unit in _UNITS}

    def route(self, case: RouterCase) -> tuple[Callable[[], None], torch.Tensor]:
        """(launch of the selection, topk_ids [M, k]). The launch raises when the kernel does not serve the shape."""
        tokens, device = case.logits.shape[0], case.logits.device
        weights = torch.empty(tokens, case.top_k, device=device)
        ids = torch.empty(tokens, case.top_k, dtype=torch.int32, device=device)
        run = self._modules["route"].run

        def call() -> None:
            with self._ffi.use_torch_stream():
                run(case.logits, case.bias, weights, ids, case.top_k, 1.0, True, False, False)

        return call, ids

    def align(self, ids: torch.Tensor, num_experts: int, block_m: int) -> Callable[[], None]:
        """A launch of the plan's two kernels for ids [M, k]."""
        blocks = max_route_blocks(ids.shape[0], ids.shape[1], num_experts, block_m)
        sizes = (blocks * block_m, blocks, 1, num_experts + 2)
        slots, experts, extent, cumulated = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in sizes)
        run = self._modules["align"].moe_align_block_size

        def call() -> None:
            with self._ffi.use_torch_stream():
                run(ids, num_experts + 1, block_m, slots, experts, extent, cumulated, True)

        return call


def torch_route(case: RouterCase) -> tuple[Callable[[], None], torch.Tensor]:
    """(sigmoid, bias, topk, id sort and weights, topk_ids [M, k]): the best that torch does by itself."""
    ids = torch.empty(case.logits.shape[0], case.top_k, dtype=torch.int32, device=case.logits.device)

    def call() -> None:
        scores = torch.sigmoid(case.logits.float())
        chosen = torch.topk(scores + case.bias, case.top_k, dim=1, sorted=False).indices.sort(dim=1).values
        weights = scores.gather(1, chosen)
        weights /= weights.sum(1, keepdim=True)
        ids.copy_(chosen)

    return call, ids


def torch_align(ids: torch.Tensor, num_experts: int, block_m: int) -> Callable[[], None]:
    """The plan of ids [M, k] in torch without a synchronisation, over the worst-case capacity."""
    pairs = ids.numel()
    blocks = max_route_blocks(ids.shape[0], ids.shape[1], num_experts, block_m)
    starts = torch.arange(blocks, device=ids.device) * block_m
    places = torch.arange(pairs, device=ids.device)
    slots = torch.empty(blocks * block_m, dtype=torch.int32, device=ids.device)

    def call() -> None:
        flat = ids.reshape(-1)
        experts, order = flat.sort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
        padded = (counts + block_m - 1) // block_m * block_m
        ends = padded.cumsum(0)
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        slots.fill_(pairs)
        slots.scatter_(0, places + shift[experts.long()], order.to(torch.int32))
        torch.searchsorted(ends, starts, right=True)

    return call


def _tvm_ffi(folder: Path) -> Any:  # noqa: ANN401 - a module that need not be installed
    return from_wheel(folder, "tvm_ffi", "apache_tvm_ffi")


def from_wheel(folder: Path, module: str, distribution: str) -> Any:  # noqa: ANN401
    """A module: installed, or unpacked from the folder's wheel. Raises RuntimeError when there is neither."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        wheels = sorted((folder / "whl").glob(f"{distribution}-*.whl"))
        if not wheels:
            raise RuntimeError(f"expected {distribution} installed, or its wheel in {folder}/whl") from None
        target = tempfile.mkdtemp(prefix="chord-peers-")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            for entry in wheel.infolist():
                path = Path(wheel.extract(entry, target))
                if entry.external_attr >> 16 & stat.S_IXUSR:  # zipfile drops modes; Humming runs a compiler of its own
                    path.chmod(path.stat().st_mode | stat.S_IXUSR)
        sys.path.insert(0, target)
        return importlib.import_module(module)


def _compile(folder: Path, unit: str, include: Path, output: Path) -> subprocess.Popen[str]:
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}a"
    command = [
        "nvcc", "-shared", "-Xcompiler", "-fPIC", "-std=c++20", "-O3", "--expt-relaxed-constexpr",
        f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-DSGL_CUDA_ARCH={major}{minor}0",
        "-I.", "-Iinclude", f"-I{include}", f"{unit}.cu", "-o", str(output),
    ]  # fmt: skip
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=folder, text=True, stdout=pipe, stderr=merged)  # noqa: S603 - the user's folder
