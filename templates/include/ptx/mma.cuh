// Tensor-core multiply and the bfloat16 arithmetic around it, on every architecture from sm_90 on.
#pragma once
#include "common/types.cuh"

namespace ptx {

// d += a * b: 16x8 of float32, A 16x16 and B 16x8 of bfloat16 pairs.
__device__ __forceinline__ void mma_m16n8k16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two float32 rounded to a bfloat16 pair, `low` in the lower half.
__device__ __forceinline__ u32 pack_bf16(f32 low, f32 high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// x * y + z, rounded once. Subnormal numbers count, in and out.
__device__ __forceinline__ u32 fma_bf16x2(u32 x, u32 y, u32 z) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}

__device__ __forceinline__ u32 mul_bf16x2(u32 x, u32 y) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// One half of a pair in both halves. Spelled as 16-bit moves, which the compiler folds into the multiply's operand.
__device__ __forceinline__ u32 low_twice(u32 pair) {
    u32 r;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tmov.b32 %0, {l, l};\n\t}" : "=r"(r) : "r"(pair));
    return r;
}

__device__ __forceinline__ u32 high_twice(u32 pair) {
    u32 r;
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tmov.b32 %0, {h, h};\n\t}" : "=r"(r) : "r"(pair));
    return r;
}

}  // namespace ptx
