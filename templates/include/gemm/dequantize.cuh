// INT4 codes to bfloat16 weights: (code - 8) * scale, rounded once. A lane's word is its share of a 16x16 block; nibbles
// i and i + 4 make register i of the A fragment of mma.m16n8k16 and of wgmma alike.
//
// A bfloat16 whose exponent field is 0 or 1 is its lower 8 bits times 2^-133: so the two nibbles of a byte, masked in
// place, are numbers already, code * 2^-133 and code * 2^-129, and one fused multiply-add makes (code - 8) * scale of
// them. The factor 2^-133 is undone in two parts: 2^96 goes into the scale, kUnit = 2^37 into the finished sum.
#pragma once
#include "common/types.cuh"
#include "gemm/tile.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

namespace gemm {

constexpr f32 kUnit = 137438953472.f;  // 2^37: what a sum of dequantised products has to be multiplied by
constexpr u32 kUnitPair = 0x52005200u;  // the same as bfloat16, twice: for sums that have been rounded
static_assert(kUnit == f32{1 << 30} * f32{1 << 7}, "two to the 37th");

// One warp's share of a 64 x 64 block: 16 outputs, four k16 steps, two scale groups.
struct Words {
    u32 code[4], scale[2];

    Words() = default;
    __device__ __forceinline__ Words(u32 block, u32 warp, u32 lane) { load(block, warp, lane); }
    __device__ __forceinline__ void load(u32 block, u32 warp, u32 lane) {
        const uint4 v = ptx::load_shared_v4(block + warp * 512 + lane * 16);
        code[0] = v.x, code[1] = v.y, code[2] = v.z, code[3] = v.w;
        const u32 scales = block + kScaleBytes + lane / 4 * 16 + warp * 4;
        scale[0] = ptx::load_shared(scales);
        scale[1] = ptx::load_shared(scales + 128);
    }
};

// What a group's codes are multiplied by and what is added: row g in the lower halves, row g + 8 in the upper. Row g's
// codes are lower nibbles of their bytes, row g + 8's upper ones, hence 16 times as large.
struct Factors {
    u32 times, plus;
    __device__ __forceinline__ explicit Factors(u32 scales) {
        constexpr u32 k2to96and92 = 0x6d806f80u, kMinus2toMinus34 = 0xae80ae80u;
        times = ptx::mul_bf16x2(scales, k2to96and92);
        plus = ptx::mul_bf16x2(scales, kMinus2toMinus34);
    }
};

// A k16 step.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 word, const Factors& by) {
    constexpr u32 kLower = 0x000f000fu, kUpper = 0x00f000f0u;
    const u32 next = word >> 8;
    const u32 upper_times = ptx::low_twice(by.times), upper_plus = ptx::low_twice(by.plus);
    const u32 lower_times = ptx::high_twice(by.times), lower_plus = ptx::high_twice(by.plus);
    a[0] = ptx::fma_bf16x2(word & kLower, upper_times, upper_plus);
    a[1] = ptx::fma_bf16x2(word & kUpper, lower_times, lower_plus);
    a[2] = ptx::fma_bf16x2(next & kLower, upper_times, upper_plus);
    a[3] = ptx::fma_bf16x2(next & kUpper, lower_times, lower_plus);
}

// All four steps of a k64 block.
__device__ __forceinline__ void dequantize(u32 (&a)[4][4], const Words& words) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const Factors by(words.scale[half]);
        dequantize(a[2 * half], words.code[2 * half], by);
        dequantize(a[2 * half + 1], words.code[2 * half + 1], by);
    }
}

}  // namespace gemm
