// Special registers.
#pragma once
#include "common/types.cuh"

namespace ptx {

// threadIdx.x, read where it is written: what follows from it is not kept in registers over a loop.
__device__ __forceinline__ u32 thread_id() {
    u32 value;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
    return value;
}

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
