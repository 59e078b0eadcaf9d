// From accumulators to output rows: factor, one rounding to bfloat16, transposition through shared memory, 16-byte stores.
// Two policies: the outputs themselves, or SwiGLU of those that are interleaved gate and up rows.
#pragma once
#include "common/swiglu.cuh"
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/rows.cuh"
#include "gemm/tile.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// Where 8 packed outputs go: output `packed` (a multiple of 8) of the weights' row order, in the order of the result.
__device__ __forceinline__ u32 output_column(const Problem& problem, u32 packed) {
    if (problem.gated == 0) return packed;
    return packed / 16 * 8 + (packed / 8 % 2) * (problem.outputs / 2);
}

// Factors of the token rows 8 i + 2 (lane % 4) and the next.
template <class T>
__device__ __forceinline__ float2 row_factors(u32 slot, u32 i) {
    const uint2 pair = ptx::load_shared_v2(slot + T::slot_factors + 4 * (8 * i + 2 * (threadIdx.x % 4)));
    return make_float2(__uint_as_float(pair.x), __uint_as_float(pair.y));
}

// 16 bytes of shared memory to 8 columns of the row in place `row` of the item, if it holds one. Places without a row hold
// kNoRow and are not written: nothing leaves an expert's last row.
template <class T>
__device__ __forceinline__ void store_row_piece(const Problem& problem, u32 slot, u32 row, u32 column, u32 from) {
    const u32 pair = ptx::load_shared(slot + T::slot_ids + 4 * row);
    if (pair != kNoRow) {
        const uint4 values = ptx::load_shared_v4(from);
        *reinterpret_cast<uint4*>(problem.out + u64{pair} * problem.columns() + column) = values;
    }
}

// One warpgroup writes its strip: 64 outputs from `output` on, of the item in `slot`. Accumulator layout: ptx/wgmma.cuh.
template <class T, u32 kWidth>
__device__ __forceinline__ void store_outputs(const Problem& problem, f32 (&acc)[kWidth / 2], u32 shared, u32 slot,
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
            const float2 f = row_factors<T>(slot, i);
            acc[4 * i] *= f.x, acc[4 * i + 1] *= f.y, acc[4 * i + 2] *= f.x, acc[4 * i + 3] *= f.y;
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
        if (part + row < kWidth) store_row_piece<T>(problem, slot, part + row, column, read);
    }
}

// The same for gate and up rows: a thread holds both of an output in accumulators of its own, gate in the first two of a
// fragment. 32 token rows x 32 outputs at a time: rows 16 to 31 lie beside rows 0 to 15 in the staging memory.
template <class T, u32 kWidth>
__device__ __forceinline__ void store_swiglu(const Problem& problem, f32 (&acc)[kWidth / 2], u32 shared, u32 slot,
                                             u32 group, u32 output) {
    constexpr u32 kRows = 2 * T::staging_rows, kHalf = T::staging_pitch / 2 / 16 * 16;
    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const u32 staging = shared + T::staging + group * T::staging_bytes;
    const u32 write = staging + lane % 16 * T::staging_pitch + lane / 16 * kHalf + warp * 16;
    const u32 row = thread / 4, read = staging + row % 16 * T::staging_pitch + row / 16 * kHalf + thread % 4 * 16;
    const u32 column = output / 2 + thread % 4 * 8;
#pragma unroll
    for (u32 part = 0; part < kWidth; part += kRows) {
        u32 packed[4] = {};  // 8 token rows x 8 outputs each
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 fragment = part / 8 + i;
            if (8 * fragment >= kWidth) continue;
            f32* const d = acc + 4 * fragment;
            f32 even = swiglu(d[0], d[2]), odd = swiglu(d[1], d[3]);
            if (problem.row_weight != nullptr) {
                const float2 f = row_factors<T>(slot, fragment);
                even *= f.x, odd *= f.y;
            }
            packed[i] = ptx::pack_bf16(even, odd);
        }
        ptx::barrier_sync_aligned(1 + group, 128);  // the part before, or the item before, has been read
        ptx::store_matrix_x4_transposed(write, packed[0], packed[1], packed[2], packed[3]);
        ptx::barrier_sync_aligned(1 + group, 128);
        if (part + row < kWidth) store_row_piece<T>(problem, slot, part + row, column, read);
    }
}

template <class T, u32 kWidth>
__device__ __forceinline__ void store_strip(const Problem& problem, f32 (&acc)[kWidth / 2], u32 shared, u32 slot,
                                            u32 group, u32 output) {
    if (problem.swiglu()) {
        store_swiglu<T, kWidth>(problem, acc, shared, slot, group, output);
    } else {
        store_outputs<T, kWidth>(problem, acc, shared, slot, group, output);
    }
}

}  // namespace gemm
