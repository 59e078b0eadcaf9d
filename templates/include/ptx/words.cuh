// Single words: read-only loads, and bits set in shared memory.
#pragma once
#include "common/types.cuh"

namespace ptx {

// As load_readonly_v4 of memory.cuh.
__device__ __forceinline__ u32 load_readonly(const void* pointer) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(pointer));
    return v;
}

__device__ __forceinline__ u32 load_readonly_u16(const void* pointer) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(pointer));
    return v;
}

// Brings WORDS words near this multiprocessor, by one warp, long before they are read: a lane reads from each sector.
template <i32 WORDS>
__device__ __forceinline__ void touch(const void* pointer, u32 lane) {
#pragma unroll
    for (u32 at = 0; at < WORDS; at += 8 * kWarp)
        if (at + lane * 8 < WORDS) load_readonly(static_cast<const u32*>(pointer) + at + lane * 8);
}

__device__ __forceinline__ void or_shared_if(bool condition, u32 at, u32 bits) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %0, 0;\n\t@p red.shared.or.b32 [%1], %2;\n\t}" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(at), "r"(bits)
                 : "memory");
}

}  // namespace ptx
