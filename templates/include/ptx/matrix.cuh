// 8x8 matrices of 16-bit elements between shared memory and the registers of a warp.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i (16 bytes).
// Lane (g, c) = (lane / 4, lane % 4) gets the elements 2 c and 2 c + 1 of row g of matrix i in r[i].
__device__ __forceinline__ void load_matrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Inverse, transposed: lane (g, c) gives the elements (2 c, g) and (2 c + 1, g) of what row 2 c, 2 c + 1 will hold.
__device__ __forceinline__ void store_matrix_x2_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

__device__ __forceinline__ void store_matrix_x4_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

}  // namespace ptx
