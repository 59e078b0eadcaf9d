// Special registers.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Bits of the lanes below this one.
__device__ __forceinline__ u32 lanes_below() {
    u32 value;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(value));
    return value;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
    return value;
}

}  // namespace ptx
