// The producer's warps: one streams weights by bulk copies, three gather token rows by cp.async, all run ahead of the
// math warps over item borders, so that the ring never drains. They also tell the math warps what each item is.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/rows.cuh"
#include "gemm/schedule.cuh"
#include "gemm/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/copy_once.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// A K that does not fill its last stage: the scales of the missing k64 blocks become zero, as do their tokens. By the lane
// that arrives for the stage alone: racecheck does not see that a warp's barrier orders what other lanes have written.
template <class T>
__device__ __forceinline__ void zero_scales(u32 stage, u32 blocks) {
    constexpr u32 kPieces = (kBlockBytes - kScaleBytes) / 16;  // of one block
    for (u32 i = blocks * T::item_strips * kPieces; i < T::stage_blocks * T::item_strips * kPieces; ++i) {
        ptx::store_shared_v4(stage + i / kPieces * kBlockBytes + kScaleBytes + i % kPieces * 16, make_uint4(0, 0, 0, 0));
    }
}

// Low tiles serve experts of few rows, whose weights are read once; tall ones may be several that read the same weights.
template <class T>
__device__ __forceinline__ void load_piece(u32 to, const u8* source, u32 bytes, u32 bar, bool once) {
    if (T::max_rows <= 64 || once) {
        ptx::bulk_load_once(to, source, bytes, bar);
    } else {
        ptx::bulk_load(to, source, bytes, bar);
    }
}

// One stage's weights. A whole item is contiguous in memory; an item of fewer strips takes one copy a k64 block. The
// place of a block in the stage does not depend on which of the two it is.
template <class T>
__device__ __forceinline__ void load_weights(u32 stage, const u8* source, u32 blocks, u32 strips, u32 pitch, u32 bar,
                                             bool once) {
    ptx::mbarrier_arrive_expect(bar, blocks * strips * kBlockBytes);
    if constexpr (T::item_strips == 1) {
#pragma unroll
        for (u32 b = 0; b < T::stage_blocks; ++b) {  // a constant bound, so that one lane issues the copies in a row
            if (b < blocks) load_piece<T>(stage + b * kBlockBytes, source + b * pitch, kBlockBytes, bar, once);
        }
    } else if (strips == kStrips) {
        load_piece<T>(stage, source, blocks * (kStrips * kBlockBytes), bar, once);
    } else {
        for (u32 b = 0; b < blocks; ++b) {
            load_piece<T>(stage + b * (kStrips * kBlockBytes), source + b * pitch, strips * kBlockBytes, bar, once);
        }
    }
}

// Streams the weights of the items of the window at hand.
template <class T>
__device__ __forceinline__ void stream_weights(const Problem& problem, Schedule<T>& schedule, u32 shared,
                                               RingPosition& at) {
    Item item;
    while (schedule.next(item)) {
        const u32 pitch = smaller(problem.strips() - item.group * kStrips, kStrips) * kBlockBytes;  // of a k64 block
        const u8* source = problem.packed + item.expert * problem.expert_bytes() + item.group * problem.group_bytes() +
                           item.strip * kBlockBytes;
        for (u32 left = problem.k_blocks(); left > 0;) {
            const u32 blocks = smaller(left, T::stage_blocks);
            const u32 stage = shared + at.index * T::stage_bytes + T::token_bytes;
            ptx::mbarrier_wait(shared + T::empty + 8 * at.index, at.parity ^ 1);
            if (ptx::elect_one()) {
                if (blocks < T::stage_blocks) zero_scales<T>(stage, blocks);
                load_weights<T>(stage, source, blocks, item.strips, pitch, shared + T::full + 8 * at.index, item.only);
            }
            __syncwarp();
            source += blocks * pitch;
            left -= blocks;
            at.template next<T::stages>();
        }
    }
}

// The rows that a gather warp copies: two or four for each group of eight lanes, 16 bytes a lane. Where they lie in x is kept
// in the item's slot, not in registers, so that tiles may have any number of rows; it is loaded for all of them at once,
// and the copies are issued back to back, as a chain of load, address and copy takes 130 clocks.
template <class T>
struct Gather {
    static constexpr u32 kEach = T::max_rows <= 32 ? 2 : 4, kRows = 4 * kEach;
    static constexpr u32 kHeld = ceil_div(ceil_div(T::max_rows, T::gather_warps * kRows) * kRows, 32u);

    u32 warp, lane;
    u32 pair[kHeld];

    // Row of the tile that this lane looks up as its `h`-th: one of those that its warp copies.
    __device__ __forceinline__ u32 held_row(u32 h) const {
        const u32 index = 32 * h + lane;
        return (index / kRows * T::gather_warps + warp) * kRows + index % kRows;
    }

    template <class Rows>
    __device__ __forceinline__ void look_up(const Item& item, const Rows& rows) {
#pragma unroll
        for (u32 h = 0; h < kHeld; ++h) {
            const u32 row = held_row(h);
            pair[h] = row < item.rows ? rows.pair(item.slot + row) : kNoRow;
        }
    }

    // Writes the rows' pairs, their factors and where they lie in x, in units of 16 bytes, to the item's slot. A place
    // without a row is given the first row: what it multiplies to is not stored.
    template <class Rows>
    __device__ __forceinline__ void announce(const Item& item, const Rows& rows, const Problem& problem,
                                             u32 slot) const {
#pragma unroll
        for (u32 h = 0; h < kHeld; ++h) {
            const u32 row = held_row(h);
            if (row >= item.width) continue;
            const u32 source = pair[h] == kNoRow ? 0 : rows.source_row(pair[h]);
            ptx::store_shared(slot + T::slot_ids + 4 * row, pair[h]);
            ptx::store_shared(slot + T::slot_sources + 4 * row, source * (problem.k / 8));
            if (problem.row_weight != nullptr) {
                const f32 factor = pair[h] == kNoRow ? 0.f : problem.row_weight[pair[h]];
                ptx::store_shared(slot + T::slot_factors + 4 * row, __float_as_uint(factor));
            }
        }
        __syncwarp();
    }

    // Copies all k64 blocks of a stage, from byte `offset` of each row on. The last four rows may be more than there are.
    __device__ __forceinline__ void copy(const Item& item, const Problem& problem, u32 slot, u32 stage, u32 offset) const {
        const u32 chunk = lane % 8;
        const u8* from = reinterpret_cast<const u8*>(problem.x) + offset + chunk * 16;
#pragma unroll 1
        for (u32 row = warp * kRows + lane / 8 * kEach; row < item.rows; row += T::gather_warps * kRows) {
            const u8* source[kEach];
#pragma unroll
            for (u32 i = 0; i < kEach; ++i) {
                source[i] = from + u64{ptx::load_shared(slot + T::slot_sources + 4 * (row + i))} * 16;
            }
#pragma unroll
            for (u32 i = 0; i < kEach; ++i) {
                const u32 to = stage + (row + i) * kTokenRowBytes + (chunk ^ (row + i) % 8) * 16;
#pragma unroll
                for (u32 b = 0; b < T::stage_blocks; ++b) {
                    ptx::copy_async_16(to + b * T::token_block_bytes, source[i] + b * kTokenRowBytes);
                }
            }
        }
    }

    // The same for the first `blocks` k64 blocks; the others are zero.
    __device__ __forceinline__ void copy_part(const Item& item, const Problem& problem, u32 slot, u32 stage, u32 offset,
                                              u32 blocks) const {
        const u32 chunk = lane % 8;
        const u8* from = reinterpret_cast<const u8*>(problem.x) + offset + chunk * 16;
#pragma unroll 1
        for (u32 i = lane / 8; i < T::max_rows * T::stage_blocks; i += 4) {
            const u32 row = i / T::stage_blocks, block = i % T::stage_blocks;
            if (row / kRows % T::gather_warps != warp || row >= item.rows) continue;
            const u32 to = stage + block * T::token_block_bytes + row * kTokenRowBytes + (chunk ^ row % 8) * 16;
            if (block < blocks) {
                const u32 source = ptx::load_shared(slot + T::slot_sources + 4 * row);
                ptx::copy_async_16(to, from + block * kTokenRowBytes + u64{source} * 16);
            } else {
                ptx::store_shared_v4(to, make_uint4(0, 0, 0, 0));
            }
        }
    }
};

// Copies the token rows of the items of the window at hand, and tells the math warps what each is. The next item is looked
// up while the copies of the one before are under way.
template <class T, class Rows>
__device__ __forceinline__ void gather_tokens(const Problem& problem, const Rows& rows, Schedule<T>& schedule,
                                              u32 shared, RingPosition& at, RingPosition& slot) {
    Gather<T> gather;
    gather.warp = threadIdx.x / 32 - T::math_warps - 1;
    gather.lane = threadIdx.x % 32;
    Item item, following;
    bool more = schedule.next(item);
    if (more) gather.look_up(item, rows);
    while (more) {
        const u32 place = shared + T::slot_base + slot.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_empty + 8 * slot.index, slot.parity ^ 1);
        if (gather.warp == 0 && gather.lane == 0) {
            const u32 output = item.group * (kStrips * kBlock) + item.strip * kBlock;
            ptx::store_shared_v4(place, make_uint4(item.width, item.strips, output, 0));
        }
        gather.announce(item, rows, problem, place);
        ptx::mbarrier_arrive(shared + T::item_full + 8 * slot.index);
        slot.template next<T::slots>();
        more = schedule.next(following);
        if (more) gather.look_up(following, rows);
        u32 offset = 0;
        for (u32 left = problem.k_blocks(); left > 0;) {
            const u32 blocks = smaller(left, T::stage_blocks), full = shared + T::full + 8 * at.index;
            ptx::mbarrier_wait(shared + T::empty + 8 * at.index, at.parity ^ 1);
            const u32 stage = shared + at.index * T::stage_bytes;
            if (blocks == T::stage_blocks) {
                gather.copy(item, problem, place, stage, offset);
                ptx::copy_async_arrive(full);
            } else {  // of the zeros that are stored the copies know nothing
                gather.copy_part(item, problem, place, stage, offset, blocks);
                ptx::copy_async_wait_all();
                ptx::mbarrier_arrive(full);
            }
            offset += blocks * kTokenRowBytes;
            left -= blocks;
            at.template next<T::stages>();
        }
        item = following;
    }
}

// Tells the math warps that no item follows.
template <class T>
__device__ __forceinline__ void announce_end(u32 shared, const RingPosition& slot) {
    ptx::mbarrier_wait(shared + T::item_empty + 8 * slot.index, slot.parity ^ 1);
    if (threadIdx.x == T::first_producer + 32) {
        ptx::store_shared_v4(shared + T::slot_base + slot.index * T::slot_bytes, make_uint4(0, 0, 0, 0));
    }
    ptx::mbarrier_arrive(shared + T::item_full + 8 * slot.index);
}

// All of the producer, from the first window on. Its warps look at a new window together, once each has done everything in
// the one before.
template <class T, class Rows>
__device__ __forceinline__ void produce(const Problem& problem, const Rows& rows, u32 shared, Window window) {
    const bool streams = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) == T::math_warps;
    Schedule<T> schedule(shared, problem.strips());
    RingPosition at, slot;
    while (true) {
        schedule.open_window(window);
        if (streams) {
            stream_weights<T>(problem, schedule, shared, at);
        } else {
            gather_tokens<T>(problem, rows, schedule, shared, at, slot);
        }
        if (window.last) break;
        ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);  // nobody reads the lists any more
        schedule.leave_window();
        window = add_up_runs<T>(rows.template load_window<T>(shared, window.next), shared);
    }
    if (streams) {
        ptx::grid_launch_dependents();  // of a next kernel, which waits for this one's end where it needs it
    } else {
        announce_end<T>(shared, slot);
    }
}

}  // namespace gemm
