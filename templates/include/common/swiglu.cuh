// SwiGLU in float32.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

// silu(gate) * up. exp2 overflows to infinity and its reciprocal to 0 where silu is 0 in float32, too.
__device__ __forceinline__ f32 swiglu(f32 gate, f32 up) {
    constexpr f32 kLog2E = 1.4426950408889634f;
    return gate * ptx::reciprocal_approx_normal(1.f + ptx::exp2_approx(-kLog2E * gate)) * up;
}
