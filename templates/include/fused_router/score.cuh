// The arithmetic of the fused router that must give the same bits in every arm: score, rank value, key, weight.
// Every operation is spelled with its rounding, so that no compiler may contract it differently from one arm to the next.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace fused_router {

// Logits, widened to float: 4 in a row of float32 are one 16-byte load, of bfloat16 one 8-byte load. `at` must be a
// multiple of 4 and the row aligned to 16 (8) bytes.
struct Logits4 {
    f32 x[4];
};

__device__ __forceinline__ f32 widen_low(u32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ f32 widen_high(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ Logits4 as_logits(uint4 v) {
    return {{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}};
}

__device__ __forceinline__ Logits4 as_logits(uint2 v) {
    return {{widen_low(v.x), widen_high(v.x), widen_low(v.y), widen_high(v.y)}};
}

// What a load brings before it is widened: keeping it apart lets a caller issue loads long before their use.
__device__ __forceinline__ uint4 load_raw4(const f32* row) {
    return ptx::load_readonly_v4(row);
}

__device__ __forceinline__ uint2 load_raw4(const bf16* row) {
    return ptx::load_readonly_v2(row);
}

__device__ __forceinline__ f32 load_logit(const f32* at) {
    return __ldg(at);
}

__device__ __forceinline__ f32 load_logit(const bf16* at) {
    return __uint_as_float(static_cast<u32>(__ldg(&at->bits)) << 16);
}

template <typename T>
struct RawLogits4;
template <>
struct RawLogits4<f32> {
    using type = uint4;
};
template <>
struct RawLogits4<bf16> {
    using type = uint2;
};

// sigmoid(x). Uses exp(-|x|) <= 1, so nothing overflows, the reciprocal's operand lies in [1, 2], and scores far below
// 2^-126 stay denormal instead of becoming 0. +inf -> 1, -inf -> 0, NaN -> NaN.
__device__ __forceinline__ f32 score_of(f32 x) {
    constexpr f32 kLog2e = 1.44269504088896340736f;
    const f32 t = ptx::exp2_approx(__fmul_rn(-fabsf(x), kLog2e));
    const f32 q = ptx::reciprocal_approx_normal(__fadd_rn(1.0f, t));
    return x >= 0.0f ? q : __fmul_rn(t, q);
}

// What experts are ranked by: the bias steers the selection and never enters a weight.
__device__ __forceinline__ f32 rank_of(f32 score, f32 bias) {
    return __fadd_rn(score, bias);
}

// Order-preserving key of a rank value: unsigned comparison of keys orders as the floats do, and a NaN gets 0, below
// -inf (0x007fffff). A rank value is never -0: score >= +0, and +0 + -0 = +0, so equal floats have equal keys.
constexpr u32 kNanKey = 0;

__device__ __forceinline__ u32 key_of(f32 rank) {
    const i32 bits = __float_as_int(rank);
    const u32 key = static_cast<u32>(bits) ^ (static_cast<u32>(bits >> 31) | 0x80000000u);
    return rank == rank ? key : kNanKey;
}

// The score that a winner brings into the weights: 0 where its rank value is NaN (its key says so).
__device__ __forceinline__ f32 weight_term(f32 score, u32 key) {
    return key == kNanKey ? 0.0f : score;
}

// Sum of the k weight terms of a row, ascending expert id, one after another from 0.
template <int K>
__device__ __forceinline__ f32 sum_terms(const f32 (&terms)[K]) {
    f32 sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; ++i) sum = __fadd_rn(sum, terms[i]);
    return sum;
}

// One term's weight. `sum` is of sum_terms; a sum that is not positive divides by 1.
__device__ __forceinline__ f32 weight_of(f32 term, f32 sum, i32 renormalize, f32 factor) {
    if (renormalize) term = __fdiv_rn(term, sum > 0.0f ? sum : 1.0f);
    return __fmul_rn(term, factor);
}

}  // namespace fused_router
