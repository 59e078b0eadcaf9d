// INT4 codes to bfloat16 weights: (code - 8) * scale, rounded once. A lane's word is its share of a 16x16 block; nibbles
// i and i + 4 make register i of the A fragment of mma.m16n8k16 and of wgmma alike.
#pragma once
#include "common/types.cuh"
#include "gemm/tile.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

namespace gemm {

// One warp's share of a 64 x 64 block: 16 outputs, four k16 steps, two scale groups.
struct Words {
    u32 code[4], scale[2];

    __device__ __forceinline__ Words(u32 block, u32 warp, u32 lane) {
        const uint4 v = ptx::load_shared_v4(block + warp * 512 + lane * 16);
        code[0] = v.x, code[1] = v.y, code[2] = v.z, code[3] = v.w;
        const u32 scales = block + kScaleBytes + lane / 4 * 16 + warp * 4;
        scale[0] = ptx::load_shared(scales);
        scale[1] = ptx::load_shared(scales + 128);
    }
};

// 128 + code is exact in bfloat16 and takes one instruction; so is the difference to 136.
template <u32 kRegister>
__device__ __forceinline__ u32 code_minus_8(u32 word) {
    constexpr u32 k128 = 0x43004300u, k136 = 0x43084308u;
    return ptx::sub_bf16x2(ptx::and_or(word >> (4 * kRegister), 0x000f000fu, k128), k136);
}

// `scales`: that of row g in the lower half, of row g + 8 in the upper.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 word, u32 scales) {
    const u32 upper_rows = ptx::low_twice(scales), lower_rows = ptx::high_twice(scales);
    a[0] = ptx::mul_bf16x2(code_minus_8<0>(word), upper_rows);
    a[1] = ptx::mul_bf16x2(code_minus_8<1>(word), lower_rows);
    a[2] = ptx::mul_bf16x2(code_minus_8<2>(word), upper_rows);
    a[3] = ptx::mul_bf16x2(code_minus_8<3>(word), lower_rows);
}

}  // namespace gemm
