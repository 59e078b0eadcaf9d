// Prefix sum over a CTA.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

namespace plan {

// Sum of `value` over the threads before this one. scratch: one word a warp. All threads take part; one barrier inside, and
// the scratch is free again after the caller's next barrier.
__device__ __forceinline__ u32 exclusive_sum(u32 value, u32* scratch) {
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const u32 sum = ptx::warp_prefix_sum(value);
    if (lane == kWarp - 1) scratch[warp] = sum;
    __syncthreads();
    return ptx::warp_sum(lane < warp ? scratch[lane] : 0) + sum - value;
}

}  // namespace plan
