// Copies into shared memory that arrive on an mbarrier, and what goes with them (the 16-byte copy itself: memory.cuh).
#pragma once
#include "common/types.cuh"

namespace ptx {

// `bytes` (a multiple of 16) from global memory, counted down on the mbarrier `bar`.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(bar)
                 : "memory");
}

// Asks for the line around `pointer` to be brought into L2: one instruction for a warp's 32 lines, where bulk prefetches
// (memory.cuh) are issued lane after lane.
__device__ __forceinline__ void prefetch_line(const void* pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// Makes the mbarrier `bar` count this thread's arrival once its 16-byte copies so far have landed.
__device__ __forceinline__ void copy_async_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Orders this thread's view of shared memory before what the tensor cores or the copy engine read next.
__device__ __forceinline__ void async_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// True in one lane of a converged warp; the compiler then knows that a single lane runs what follows.
__device__ __forceinline__ bool elect_one() {
    u32 chosen;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(chosen));
    return chosen != 0;
}

}  // namespace ptx
