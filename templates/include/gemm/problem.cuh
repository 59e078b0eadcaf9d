// What a W4A16 GEMM kernel is told: tensors and sizes. Rows come from a row source (rows.cuh).
#pragma once
#include "common/types.cuh"
#include "gemm/tile.cuh"

namespace gemm {

struct Problem {
    const bf16* x;          // [rows][k]
    const u8* packed;       // [experts][outputs / 256 groups][k / 64][strips][2304]
    bf16* out;              // [pairs][columns()]
    const f32* row_weight;  // [pairs] or null
    u32 outputs, k;         // multiples of 64
    u32 gated;              // of the weights' rows and the store:
                            // 0: neither is; 1: 8 gate rows, then their 8 up rows, stored as [gate | up];
                            // 2: the same rows, stored as silu(gate) * up

    __device__ __forceinline__ bool swiglu() const { return gated == 2; }
    __device__ __forceinline__ u32 columns() const { return swiglu() ? outputs / 2 : outputs; }
    __device__ __forceinline__ u32 k_blocks() const { return k / kBlock; }
    __device__ __forceinline__ u32 strips() const { return outputs / kBlock; }
    __device__ __forceinline__ u64 expert_bytes() const { return u64{strips()} * k_blocks() * kBlockBytes; }
    __device__ __forceinline__ u64 group_bytes() const { return u64{k_blocks()} * (kStrips * kBlockBytes); }
};

}  // namespace gemm
