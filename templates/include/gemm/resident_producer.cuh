// The producer's warps of a resident program: some stream strips of weights by bulk copies, others gather row tiles and tell the
// other warps what each item is. All run ahead of the math warps over item borders.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/resident_schedule.cuh"
#include "gemm/resident_tile.cuh"
#include "gemm/rows.cuh"
#include "ptx/copy.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// One strip: its k64 blocks lie `pitch` bytes apart in memory and side by side in the stage. The loops' bounds are constants, so
// that one lane issues the copies in a row.
template <u32 kMost>
__device__ __forceinline__ void load_blocks(u32 stage, const u8* source, u32 blocks, u32 pitch, u32 bar) {
#pragma unroll
    for (u32 b = 0; b < kMost; ++b) {
        if (b < blocks) ptx::bulk_load(stage + b * kBlockBytes, source, kBlockBytes, bar);
        source += pitch;
    }
}

template <class T>
__device__ __forceinline__ void load_strip(u32 stage, const u8* source, u32 blocks, u32 pitch, u32 bar) {
    ptx::mbarrier_arrive_expect(bar, blocks * kBlockBytes);
    if (blocks == 4) {
        load_blocks<4>(stage, source, 4, pitch, bar);
    } else {
        load_blocks<T::max_blocks>(stage, source, blocks, pitch, bar);
    }
}

// This warp's strips of a window: every kStreamWarps-th, from strip `next` of the coming part on. What a part is comes from
// shared memory; the shuffles tell the compiler that all lanes agree, so that addresses are worked out once for the warp.
template <class T, class Schedule>
__device__ __forceinline__ void stream_strips(const Problem& problem, const ResidentLayout<T>& layout, Schedule& schedule,
                                              u32 shared, u32& next, RingPosition& at) {
    Part part;
    while (schedule.next(part)) {
        const u32 expert = __shfl_sync(kFullWarp, part.expert, 0), first = __shfl_sync(kFullWarp, part.strip, 0);
        const u32 strips = __shfl_sync(kFullWarp, part.strips, 0);
        const u8* weights = problem.packed + expert * problem.expert_bytes();
        for (; next < strips; next += T::stream_warps) {
            const u32 strip = first + next, group = strip / kStrips;
            const u32 pitch = smaller(problem.strips() - group * kStrips, kStrips) * kBlockBytes;
            const u8* source = weights + group * problem.group_bytes() + strip % kStrips * kBlockBytes;
            const u32 bar = shared + T::full + 8 * at.index;
            ptx::mbarrier_wait(bar + (T::empty - T::full), at.parity ^ 1);
            if (ptx::elect_one()) {
                load_strip<T>(shared + layout.ring + at.index * layout.stage_bytes, source, layout.blocks, pitch, bar);
            }
            __syncwarp();
            at.index += T::stream_warps;
            if (at.index >= layout.stages) {
                at.index -= layout.stages;
                at.parity ^= 1;
            }
        }
        next -= strips;
    }
}

// The rows that a gather warp copies, its share of a tile: its lanes hold their pairs.
template <class T>
struct RowGather {
    static constexpr u32 kHeld = ceil_div(ceil_div(T::max_rows, T::gather_warps), 32u), kBatch = 8;  // copies back to back

    u32 warp, lane;
    u32 pair[kHeld];

    // Row of the tile that lane `index % 32` holds in pair[index / 32].
    __device__ __forceinline__ u32 row_of(u32 index) const { return index * T::gather_warps + warp; }

    // Looks the rows' pairs up, writes them and their factors to the item's slot, and turns them into the rows to copy.
    template <class Rows>
    __device__ __forceinline__ void announce(const Part& part, const Rows& rows, const Problem& problem, u32 slot) {
#pragma unroll
        for (u32 h = 0; h < kHeld; ++h) {
            const u32 row = row_of(32 * h + lane);
            pair[h] = row < part.rows ? rows.pair(part.slot + row) : kNoRow;
        }
#pragma unroll
        for (u32 h = 0; h < kHeld; ++h) {
            const u32 row = row_of(32 * h + lane);
            if (row < part.width) {
                ptx::store_shared(slot + T::slot_ids + 4 * row, pair[h]);
                if (problem.row_weight != nullptr) {
                    const f32 factor = pair[h] == kNoRow ? 0.f : problem.row_weight[pair[h]];
                    ptx::store_shared(slot + T::slot_factors + 4 * row, __float_as_uint(factor));
                }
            }
            if (pair[h] != kNoRow) pair[h] = rows.source_row(pair[h]);
        }
    }

    // Copies the rows, all of K: [k64][row][128 bytes, swizzled].
    __device__ __forceinline__ void copy(const Part& part, const Problem& problem, u32 tile, u32 blocks) const {
        const u32 pieces = 8 * blocks;  // of 16 bytes in a row
        const u8* x = reinterpret_cast<const u8*>(problem.x);
        for (u32 piece = lane; piece < round_up(pieces, 32u); piece += 32) {  // by all lanes, as they tell each other the rows
            const u32 to = tile + piece / 8 * part.width * kTokenRowBytes, chunk = piece % 8 * 16;
            const u8* from = x + piece * 16;
#pragma unroll
            for (u32 h = 0; h < kHeld; ++h) {
#pragma unroll 1
                for (u32 first = 0; first < 32; first += kBatch) {
                    if (row_of(32 * h + first) >= part.rows) break;
#pragma unroll
                    for (u32 i = 0; i < kBatch; ++i) {
                        const u32 row = row_of(32 * h + first + i), source = __shfl_sync(kFullWarp, pair[h], first + i);
                        if (source != kNoRow && piece < pieces) {
                            ptx::copy_async_16(to + row * kTokenRowBytes + (chunk ^ row % 8 * 16),
                                               from + u64{source} * (problem.k * 2));
                        }
                    }
                }
            }
        }
    }
};

// Where the tiles go: the first to the lower end of the memory for them, the second to the upper end, and so on.
struct TilePlaces {
    RingPosition at;  // of the coming tile
    u32 bytes_before = 0;

    // The coming tile's address, once the one before the last has been read, and the last, too, if there is no room beside it.
    template <class T>
    __device__ __forceinline__ u32 take(u32 shared, const ResidentLayout<T>& layout, u32 bytes) {
        static_assert(T::buffers == 2, "a tile at each end");
        ptx::mbarrier_wait(shared + T::tokens_empty + 8 * at.index, at.parity ^ 1);
        if (bytes + bytes_before > layout.held_bytes) {
            ptx::mbarrier_wait(shared + T::tokens_empty + 8 * (at.index ^ 1), at.index == 0 ? at.parity ^ 1 : at.parity);
        }
        const u32 address = shared + T::tokens + (at.index == 0 ? 0 : layout.held_bytes - bytes);
        bytes_before = bytes;
        at.template next<T::buffers>();
        return address;
    }
};

// The row tiles of a window. `slot` and `places`: where the next item goes.
template <class T, class Rows, class Schedule>
__device__ __forceinline__ void gather_tiles(const Problem& problem, const ResidentLayout<T>& layout, const Rows& rows,
                                             Schedule& schedule, u32 shared, RingPosition& slot, TilePlaces& places) {
    RowGather<T> gather;
    gather.warp = ptx::thread_id() / 32 - T::first_producer / 32 - T::stream_warps;
    gather.lane = ptx::thread_id() % 32;
    Part part;
    while (schedule.next(part)) {
        const u32 place = shared + T::slot_base + slot.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_empty + 8 * slot.index, slot.parity ^ 1);
        gather.announce(part, rows, problem, place);
        const u32 tile = places.take<T>(shared, layout, part.width * layout.blocks * kTokenRowBytes);
        if (gather.warp == 0 && gather.lane == 0) {
            ptx::store_shared_v4(place, make_uint4(part.width, part.strips, part.strip * kBlock, tile | part.rows));
        }
        gather.copy(part, problem, tile, layout.blocks);
        ptx::copy_async_wait_all();
        ptx::async_proxy_fence();
        ptx::mbarrier_arrive(shared + T::item_full + 8 * slot.index);
        slot.template next<T::slots>();
    }
}

// All producer warps, the streaming ones first, from the first window on. After the last one comes an item of no width: the end.
template <class T, class Rows>
__device__ __forceinline__ void produce(const Problem& problem, const Rows& rows, u32 shared, u32 warp, Window window) {
    const ResidentLayout<T> layout(problem.k_blocks());
    ResidentSchedule<T> schedule(shared, problem.strips(), layout.tile_rows);
    RingPosition place;  // of the next strip's stage, or of the next item's slot
    TilePlaces places;
    u32 next = warp;
    if (warp < T::stream_warps) place.index = warp;
    while (true) {
        schedule.open_window(window);
        if (warp < T::stream_warps) {
            stream_strips<T>(problem, layout, schedule, shared, next, place);
        } else {
            gather_tiles<T>(problem, layout, rows, schedule, shared, place, places);
        }
        if (window.last) break;
        ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);  // nobody reads the lists any more
        window = find_runs<T>(rows, shared, window.next);
    }
    if (warp < T::stream_warps) {
        ptx::grid_launch_dependents();  // of a next kernel, which waits for this one's end where it needs it
        return;
    }
    ptx::mbarrier_wait(shared + T::item_empty + 8 * place.index, place.parity ^ 1);
    if (warp == T::stream_warps && ptx::thread_id() % 32 == 0) {
        ptx::store_shared_v4(shared + T::slot_base + place.index * T::slot_bytes, make_uint4(0, 0, 0, 0));
    }
    ptx::mbarrier_arrive(shared + T::item_full + 8 * place.index);
}

}  // namespace gemm
