// Bulk copies of what is read once.
#pragma once
#include "common/types.cuh"

namespace ptx {

// As bulk_load (copy.cuh). Its lines leave L2 before others do, which therefore stay.
__device__ __forceinline__ void bulk_load_once(u32 destination, const void* source, u32 bytes, u32 bar) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
}

}  // namespace ptx
