"""A small tree of tables, templates and headers that builds in a second: what the builder's tests take apart."""

from __future__ import annotations

import shutil
from pathlib import Path

from chord import _paths
from chord._version import __version__

ARCHS = ("sm_90a", "sm_100a", "sm_103a")

TABLE = """
schema = 1
operator = "toy"
abi_version = 1

[[axes]]
keys = ["width", "lanes"]
choices = [[64, 2], [128, 4]]
[[axes]]
keys = ["kind"]
choices = [["f32"], ["bf16"]]
[[axes]]
keys = ["num_tokens"]
first = 0
last = 1000
[[axes]]
keys = ["block_m"]
first = 8
last = 32
step = 8

[tags]
width = "w"
lanes = "l"
num_tokens = "t"
block_m = "bm"

[args]
out = "buffer f32"
num_tokens = "parameter i32"
factor = "parameter f32"

[[arms]]
name = "single"
summary = "one block for one token"
template = "toy/single.cu.j2"
args = ["out", "factor"]
constants = { threads = "width * lanes // 2" }
  [[arms.kernels]]
  block = "threads"
  grid = { blocks = 1 }

[[arms]]
name = "many"
summary = "a block for each token, then a second kernel"
template = "toy/many.cu.j2"
args = ["out", "num_tokens", "factor"]
workspace = { bytes = "width * 4", bytes_per_token = 8, zeroed = true }
  [[arms.kernels]]
  block = 128
  grid = { param = "num_tokens", max_per_sm = 4 }
  [[arms.kernels]]
  suffix = "finish"
  block = [32, 2]
  cluster = 2
  dynamic_smem_bytes = "width * 16"
  grid = { blocks = 4 }
  dependent = true

[[programs]]
arm = "single"
num_tokens = [1, 2]
block_m = [8]
only = { kind = ["f32"] }
archs = ["sm_90a", "sm_100a", "sm_103a"]

[[programs]]
arm = "many"
archs = ["sm_90a", "sm_100a", "sm_103a"]

[[routes]]
archs = ["sm_90a", "sm_100a", "sm_103a"]
note = "reasoned"
block_m = [8, 8]
only = { kind = ["f32"] }
table = [
  [0, 0, "many"],
  [1, 1, "single"],
  [2, 2, "single"],
  [3, 1000, "many"],
]
[[routes]]
archs = ["sm_90a", "sm_100a", "sm_103a"]
block_m = [16, 32]
only = { kind = ["f32"] }
table = [[0, 1000, "many"]]
[[routes]]
archs = ["sm_90a", "sm_100a", "sm_103a"]
only = { kind = ["bf16"] }
table = [[0, 1000, "many"]]
"""

SINGLE = """
#include "toy/scale.cuh"

extern "C" __global__ void __launch_bounds__({{ threads }}) {{ symbol }}(float* out, float factor) {
    constexpr int kThreads = {{ threads }};
    if (threadIdx.x < kThreads) out[threadIdx.x] = toy::scale(threadIdx.x, factor) + {{ num_tokens }};
}
"""

MANY = """
#include "toy/scale.cuh"

extern "C" __global__ void {{ symbol }}(float* out, int num_tokens, float factor) {
    if (threadIdx.x < {{ width }} && blockIdx.x < num_tokens) out[threadIdx.x] = toy::scale(blockIdx.x, factor);
}

extern "C" __global__ void {{ symbol }}_finish(float* out, int num_tokens, float factor) {
    __shared__ float staged[{{ lanes }}];
    if (threadIdx.x < {{ lanes }}) staged[threadIdx.x] = factor;
    __syncthreads();
    if (threadIdx.x < {{ lanes }}) out[num_tokens + threadIdx.x] = staged[{{ lanes }} - 1 - threadIdx.x];
}
"""

SCALE = """
#pragma once
#include <common/base.cuh>

namespace toy {
__device__ __forceinline__ float scale(int value, float factor) {
    return static_cast<float>(value) * factor * kUnit;
}
}  // namespace toy
"""

BASE = """
#pragma once
#if defined(TOY_VERBOSE)
#include "common/verbose.cuh"
#endif
constexpr float kUnit = 1.0f;
"""

FILES = {
    "registry/toy.toml": TABLE,
    "registry/registry.toml": f'version = "{__version__}"\nserial = 3\n',
    "templates/toy/single.cu.j2": SINGLE,
    "templates/toy/many.cu.j2": MANY,
    "templates/include/toy/scale.cuh": SCALE,
    "templates/include/common/base.cuh": BASE,
    "templates/include/common/verbose.cuh": "#pragma once\n",
}

PROGRAMS = 2 * 2 + 4
CUBINS = PROGRAMS * len(ARCHS)


def write(root: Path) -> Path:
    """Write the tree under `root`, with this project's toolchain pin."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
    (root / "build").mkdir(exist_ok=True)
    shutil.copy(_paths.PACKAGE.parent / "build" / "toolchain.toml", root / "build")
    return root


def edit(root: Path, name: str, old: str, new: str) -> None:
    """Replace the only occurrence of `old` in one file of the tree."""
    text = (root / name).read_text()
    assert text.count(old) == 1, f"{name}: {old!r} occurs {text.count(old)} times"
    (root / name).write_text(text.replace(old, new))
