// From accumulators to output rows: factor, one rounding to bfloat16, transposition through shared memory, 16-byte stores.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/rows.cuh"
#include "gemm/tile.cuh"
#include "ptx/mma.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// Where 8 packed outputs go: output `packed` (a multiple of 8) of the weights' row order, in the order of the result.
__device__ __forceinline__ u32 output_column(const Problem& problem, u32 packed) {
    if (problem.half == 0) return packed;
    return packed / 16 * 8 + (packed / 8 % 2) * problem.half;
}

// One warpgroup writes its strip: 64 outputs from `output` on, of the item in `slot`. Accumulator layout: ptx/wgmma.cuh.
// Slots without a row hold kNoRow and are not written: nothing leaves an expert's last row.
template <class T, u32 kWidth>
__device__ __forceinline__ void store_strip(const Problem& problem, f32 (&acc)[kWidth / 2], u32 shared, u32 slot,
                                            u32 group, u32 output) {
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 staging = shared + T::staging + group * T::staging_bytes;
    // stmatrix: lanes 8 i .. 8 i + 7 address the token rows of matrix i: tokens 0-7 x outputs 0-7, 0-7 x 8-15, then 8-15.
    const u32 write = staging + (lane % 8 + lane / 16 * 8) * T::staging_pitch + warp * 32 + lane / 8 % 2 * 16;
    const u32 row = thread / 8, read = staging + row * T::staging_pitch + thread % 8 * 16;
    const u32 column = output_column(problem, output + thread % 8 * 8);
    if (problem.row_weight != nullptr) {
#pragma unroll
        for (u32 i = 0; i < kWidth / 8; ++i) {
            const uint2 pair = ptx::load_shared_v2(slot + T::slot_factors + 4 * (8 * i + 2 * (lane % 4)));
            const f32 even = __uint_as_float(pair.x), odd = __uint_as_float(pair.y);
            acc[4 * i] *= even, acc[4 * i + 1] *= odd, acc[4 * i + 2] *= even, acc[4 * i + 3] *= odd;
        }
    }
#pragma unroll
    for (u32 part = 0; part < kWidth; part += T::staging_rows) {
        const u32 i = part / 2;  // first accumulator of the part
        const u32 a = ptx::pack_bf16(acc[i], acc[i + 1]), b = ptx::pack_bf16(acc[i + 2], acc[i + 3]);
        ptx::barrier_sync_aligned(1 + group, 128);  // the part before, or the item before, has been read
        if (part + 8 < kWidth) {
            const u32 c = ptx::pack_bf16(acc[i + 4], acc[i + 5]), d = ptx::pack_bf16(acc[i + 6], acc[i + 7]);
            ptx::store_matrix_x4_transposed(write, a, b, c, d);
        } else {
            ptx::store_matrix_x2_transposed(write, a, b);
        }
        ptx::barrier_sync_aligned(1 + group, 128);
        if (part + row < kWidth) {
            const u32 pair = ptx::load_shared(slot + T::slot_ids + 4 * (part + row));
            if (pair != kNoRow) {
                const uint4 values = ptx::load_shared_v4(read);
                *reinterpret_cast<uint4*>(problem.out + u64{pair} * problem.outputs + column) = values;
            }
        }
    }
}

}  // namespace gemm
