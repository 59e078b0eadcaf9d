// A join of all CTAs of a co-resident grid on one word of global memory that starts as 0 and may then be used by any number
// of launches, of any grid size, one after the other.
#pragma once
#include "common/types.cuh"
#include "ptx/memory.cuh"

namespace plan {

// All threads of all CTAs take part; what they wrote before is visible after (read it past L1). Every CTA adds 1, but CTA 0
// adds what is missing to 2^31: a full round flips the top bit and leaves the lower bits as they were.
__device__ __forceinline__ void join_grid(u32* word) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        const u32 old = ptx::fetch_add_acq_rel(word, step);
        while (((ptx::load_acquire(word) ^ old) & 0x80000000u) == 0) {
        }
    }
    __syncthreads();
}

}  // namespace plan
