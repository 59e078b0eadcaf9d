"""The cubin reader, on cubins from the pinned compiler and on what is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.registry.samples import compiled, kernel_source

from chord.errors import VerificationError
from chord.registry.cubin import describe, parse

SPILLING = """
extern "C" __global__ __launch_bounds__(1024) void spill(float* x, int n) {
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; i++) a[i] = x[i * 1024 + threadIdx.x];
  for (int j = 0; j < n; j++) {
#pragma unroll
    for (int i = 0; i < 96; i++) a[i] = a[i] * a[(i + 7) % 96] + a[(i * 5) % 96];
  }
#pragma unroll
  for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = a[i];
}
extern "C" __global__ void shared(float* x, long long n, char c) {
  __shared__ float s[64];
  s[threadIdx.x % 64] = x[n];
  __syncthreads();
  x[n] = s[c];
}
"""
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a", "sm_120a"])
def test_the_target_is_exact(arch):
    assert parse(compiled(kernel_source("k"), arch)).arch == arch


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_resources(arch):
    info = parse(compiled(SPILLING, arch))
    assert set(info.kernels) == {"spill", "shared"}
    spill, shared = info.kernels["spill"], info.kernels["shared"]
    assert spill.registers == 64
    assert spill.spill_bytes > 0
    assert spill.static_smem_bytes == 0
    assert spill.parameter_bytes == (8, 4)
    assert 0 < shared.registers < 64
    assert shared.spill_bytes == 0
    assert shared.static_smem_bytes == 256
    assert shared.parameter_bytes == (8, 8, 1)


@pytest.mark.parametrize(
    ("data", "looks_like"),
    [
        (b"", "an empty file"),
        (LFS_POINTER, "a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html><title>404</title>", "an HTML page"),
        (b"Not found\n", "text that begins b'Not found"),
        (b"\0" * 64, "nothing but zero bytes"),
        (b"\x89PNG\r\n", "no ELF"),
        (b"\x7fELF\x02\x01", r"a truncated ELF \(6 bytes\)"),
    ],
)
def test_what_is_no_cubin_is_described(data, looks_like):
    with pytest.raises(VerificationError, match=f"expected a cubin, got {looks_like}"):
        parse(data)


def test_another_elf_is_described():
    header = bytearray(64)
    header[:7], header[18] = b"\x7fELF\x02\x01\x01", 62
    assert describe(bytes(header)) == "an ELF for x86-64, not for CUDA"
    python = Path(sys.executable).resolve().read_bytes()
    if python.startswith(b"\x7fELF"):
        with pytest.raises(VerificationError, match=r"an ELF for .*, not for CUDA"):
            parse(python)


@given(st.data())
def test_every_truncation_is_noticed(data):
    cubin = compiled(kernel_source("k"), "sm_90a")
    length = data.draw(st.integers(4, len(cubin) - 1))
    with pytest.raises(VerificationError, match=r"truncated"):
        parse(cubin[:length])


@given(st.data())
def test_damage_is_an_error_or_harmless_and_never_a_crash(data):
    cubin = bytearray(compiled(kernel_source("k"), "sm_100a"))
    for _ in range(data.draw(st.integers(1, 4))):
        cubin[data.draw(st.integers(0, len(cubin) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse(bytes(cubin))
    except VerificationError:
        describe(bytes(cubin))
