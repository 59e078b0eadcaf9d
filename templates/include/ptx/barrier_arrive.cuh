// The half of a named barrier that does not wait.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Arrives at named barrier `id` of `threads` threads, some of which wait there by barrier_sync_aligned. Of converged warps.
__device__ __forceinline__ void barrier_arrive_aligned(u32 id, u32 threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
