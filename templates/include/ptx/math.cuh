// Approximate arithmetic of the special-function unit, and reductions over a warp.
#pragma once
#include "common/types.cuh"

namespace ptx {

// 2^x, at most 2 ulp. Denormal results are kept: the .ftz form would flush them.
__device__ __forceinline__ f32 exp2_approx(f32 x) {
    f32 y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/x, at most 1 ulp, for a normal x with a normal reciprocal: .ftz then only saves the compiler's denormal path.
__device__ __forceinline__ f32 reciprocal_approx_normal(f32 x) {
    f32 y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Reductions over all 32 lanes; every lane gets the result. All lanes must take part.
__device__ __forceinline__ u32 warp_max(u32 x) {
    u32 y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ i32 warp_max(i32 x) {
    i32 y;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ i32 warp_min(i32 x) {
    i32 y;
    asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ u32 warp_min(u32 x) {
    u32 y;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ u32 warp_sum(u32 x) {
    u32 y;
    asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// Inclusive prefix sum over the lanes. One block of assembly: as C++ the compiler may clone the shuffles for single lanes.
__device__ __forceinline__ i32 warp_prefix_sum(i32 x) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t.reg .s32 t;\n\t"
        "shfl.sync.up.b32 t|p, %0, 1, 0, 0xffffffff;\n\t@p add.s32 %0, %0, t;\n\t"
        "shfl.sync.up.b32 t|p, %0, 2, 0, 0xffffffff;\n\t@p add.s32 %0, %0, t;\n\t"
        "shfl.sync.up.b32 t|p, %0, 4, 0, 0xffffffff;\n\t@p add.s32 %0, %0, t;\n\t"
        "shfl.sync.up.b32 t|p, %0, 8, 0, 0xffffffff;\n\t@p add.s32 %0, %0, t;\n\t"
        "shfl.sync.up.b32 t|p, %0, 16, 0, 0xffffffff;\n\t@p add.s32 %0, %0, t;\n\t}"
        : "+r"(x));
    return x;
}

__device__ __forceinline__ u32 warp_prefix_sum(u32 x) {
    return static_cast<u32>(warp_prefix_sum(static_cast<i32>(x)));
}

__device__ __forceinline__ u32 warp_or(u32 x) {
    u32 y;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

}  // namespace ptx
