// Instructions that only the throughput arms need.
#pragma once
#include "common/types.cuh"

namespace ptx {

// tanh(x) with a relative error of at most 2^-11 (the instruction set's own bound). +-inf -> +-1, NaN -> NaN.
__device__ __forceinline__ f32 tanh_approx(f32 x) {
    f32 y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ptx
