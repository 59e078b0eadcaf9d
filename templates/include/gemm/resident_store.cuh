// The storing warps of a resident program: finished strips from the staging tiles to the output's rows, 16 bytes a lane.
#pragma once
#include "common/types.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/problem.cuh"
#include "gemm/resident_tile.cuh"
#include "gemm/rows.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// One of the warps that store what a math warpgroup multiplies: where it is in the line of strips.
struct StoreWarp {
    u32 shared, group, share, lane;
    u32 next, parity = 0;  // the strip that comes next, counted from the item's first; the staging tile's next round
};

// This warp's rows of an item's strips: kLanes lanes a row, so 8 * kLanes columns of 32 / kLanes rows in a pass. Which rows they are
// is the same for all strips, so it is looked up once. Slots without a row hold kNoRow and are not written. (opaque: what the
// compiler would keep of each row, from item to item or from strip to strip, does not fit the registers.)
template <class T, u32 kLanes>
__device__ __forceinline__ void store_item(const Problem& problem, StoreWarp& warp, u32 ids, uint4 header) {
    constexpr u32 kPass = 32 / kLanes, kStep = kPass * T::store_warps, kHeld = ceil_div(T::max_rows, kStep);
    constexpr u32 kBatch = smaller(kHeld, 4u);
    const u32 first = ptx::opaque(warp.share * kPass + warp.lane / kLanes), rows = header.w % kTileAlignment;
    const u32 full = warp.shared + T::staged_full + 8 * warp.group, empty = warp.shared + T::staged_empty + 8 * warp.group;
    const u32 read = warp.shared + T::staging + warp.group * T::staging_bytes + first * T::staging_pitch + warp.lane % kLanes * 16;
    u32 pair[kHeld];
#pragma unroll
    for (u32 h = 0; h < kHeld; ++h) {
        pair[h] = first + h * kStep < rows ? ptx::load_shared(ids + 4 * (first + h * kStep)) : kNoRow;
    }
    for (; warp.next < header.y; warp.next += T::groups) {
        const u32 output = header.z + warp.next * kBlock;
        bf16* const column = problem.out + (kLanes == 4 ? output / 2 + warp.lane % kLanes * 8
                                                        : output_column(problem, output + warp.lane % kLanes * 8));
        const u32 columns = ptx::opaque(problem.columns());
        ptx::mbarrier_wait(full, warp.parity);
        warp.parity ^= 1;
#pragma unroll
        for (u32 from = 0; from < kHeld; from += kBatch) {
            if (from * kStep >= rows) break;
            uint4 values[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                if (from + i < kHeld && pair[from + i] != kNoRow) {
                    values[i] = ptx::load_shared_v4(read + (from + i) * kStep * T::staging_pitch);
                }
            }
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                if (from + i < kHeld && pair[from + i] != kNoRow) {
                    *reinterpret_cast<uint4*>(column + u64{pair[from + i]} * columns) = values[i];
                }
            }
        }
        __syncwarp();
        if (warp.lane == 0) ptx::mbarrier_arrive(empty);
    }
    warp.next -= header.y;
}

template <class T>
__device__ __forceinline__ void store_parts(const Problem& problem, u32 shared, u32 index) {
    const u32 group = index / T::store_warps;
    StoreWarp warp{shared, group, index % T::store_warps, threadIdx.x % 32, group};
    RingPosition slot;
    while (true) {
        const u32 place = shared + T::slot_base + slot.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_full + 8 * slot.index, slot.parity);
        const uint4 header = ptx::load_shared_v4(place);  // width, strips, first output, the tile's address and rows
        if (header.x == 0) break;
        if (problem.swiglu()) {
            store_item<T, 4>(problem, warp, place + T::slot_ids, header);
        } else {
            store_item<T, 8>(problem, warp, place + T::slot_ids, header);
        }
        ptx::mbarrier_arrive(shared + T::item_empty + 8 * slot.index);
        slot.template next<T::slots>();
    }
}

}  // namespace gemm
