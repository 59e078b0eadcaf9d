// The storing warps of a resident program: finished strips from the staging tiles to the output's rows, 16 bytes a lane.
#pragma once
#include "common/types.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/problem.cuh"
#include "gemm/resident_tile.cuh"
#include "gemm/rows.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// A warp's share of a strip: kLanes lanes a row, so 8 * kLanes columns of 32 / kLanes rows in a pass. `column`: this lane's 8
// columns of row 0. Slots without a row hold kNoRow and are not written.
template <class T, u32 kLanes>
__device__ __forceinline__ void store_staged(bf16* column, u32 columns, u32 staging, u32 ids, u32 rows, u32 share) {
    constexpr u32 kPass = 32 / kLanes, kStep = kPass * T::store_warps, kBatch = 4;
    const u32 lane = threadIdx.x % 32, place = lane % kLanes * 16;
    for (u32 row = share * kPass + lane / kLanes; row < rows; row += kBatch * kStep) {
        u32 pair[kBatch];
        uint4 values[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 other = row + i * kStep;
            pair[i] = other < rows ? ptx::load_shared(ids + 4 * other) : kNoRow;
            if (other < rows) values[i] = ptx::load_shared_v4(staging + other * T::staging_pitch + place);
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            if (pair[i] != kNoRow) *reinterpret_cast<uint4*>(column + u64{pair[i]} * columns) = values[i];
        }
    }
}

template <class T>
__device__ __forceinline__ void store_parts(const Problem& problem, u32 shared, u32 warp) {
    const u32 group = warp / T::store_warps, share = warp % T::store_warps, lane = threadIdx.x % 32;
    const u32 staging = shared + T::staging + group * T::staging_bytes;
    const u32 full = shared + T::staged_full + 8 * group, empty = shared + T::staged_empty + 8 * group;
    RingPosition slot;
    u32 next = group, parity = 0;
    while (true) {
        const u32 place = shared + T::slot_base + slot.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_full + 8 * slot.index, slot.parity);
        const uint4 header = ptx::load_shared_v4(place);  // width, strips, first output, rows
        if (header.x == 0) break;
        for (; next < header.y; next += T::groups) {
            const u32 output = header.z + next * kBlock, ids = place + T::slot_ids;
            ptx::mbarrier_wait(full, parity);
            parity ^= 1;
            if (problem.swiglu()) {
                bf16* column = problem.out + output / 2 + lane % 4 * 8;
                store_staged<T, 4>(column, problem.columns(), staging, ids, header.w, share);
            } else {
                bf16* column = problem.out + output_column(problem, output + lane % 8 * 8);
                store_staged<T, 8>(column, problem.columns(), staging, ids, header.w, share);
            }
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(empty);
        }
        next -= header.y;
        ptx::mbarrier_arrive(shared + T::item_empty + 8 * slot.index);
        slot.template next<T::slots>();
    }
}

}  // namespace gemm
