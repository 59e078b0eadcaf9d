// Shared memory by its 32-bit address (shared_address): no window arithmetic at each access, and stores under a predicate
// instead of a branch.
#pragma once
#include "common/types.cuh"

namespace ptx {

__device__ __forceinline__ uint4 load_shared_v4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_v2(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(u32 at, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_v4(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void max_shared(u32 at, u32 value) {
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_shared_u16(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_if(bool condition, u32 at, uint4 v) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %0, 0;\n\t"
        "@p st.shared.v4.u32 [%1], {%2, %3, %4, %5};\n\t}" ::"r"(static_cast<u32>(condition)),
        "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

__device__ __forceinline__ void store_shared_if(bool condition, u32 at, u32 v) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %0, 0;\n\t@p st.shared.u32 [%1], %2;\n\t}" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(at), "r"(v)
                 : "memory");
}

// Two words to an 8-byte-aligned place.
__device__ __forceinline__ void store_shared_if(bool condition, u32 at, u32 x, u32 y) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %0, 0;\n\t@p st.shared.v2.u32 [%1], {%2, %3};\n\t}" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(at), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void store_shared_u16_if(bool condition, u32 at, u32 v) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %0, 0;\n\t@p st.shared.u16 [%1], %2;\n\t}" ::"r"(
                     static_cast<u32>(condition)),
                 "r"(at), "h"(static_cast<u16>(v))
                 : "memory");
}

}  // namespace ptx
