// The producer's warps: one streams weights by bulk copies, three gather token rows by cp.async, all run ahead of the
// math warps over item borders, so that the ring never drains. They also tell the math warps what each item is.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/rows.cuh"
#include "gemm/schedule.cuh"
#include "gemm/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// A K that does not fill its last stage: the scales of the missing k64 blocks become zero, as do their tokens.
template <class T>
__device__ __forceinline__ void zero_scales(u32 stage, u32 blocks, u32 lane) {
    constexpr u32 kPieces = (kBlockBytes - kScaleBytes) / 16;  // of one block
    for (u32 i = blocks * kStrips * kPieces + lane; i < T::stage_blocks * kStrips * kPieces; i += 32) {
        ptx::store_shared_v4(stage + i / kPieces * kBlockBytes + kScaleBytes + i % kPieces * 16, make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
}

// One stage's weights. A whole item is contiguous in memory; an item of fewer strips takes one copy a k64 block. The
// place of a block in the stage does not depend on which of the two it is.
template <class T>
__device__ __forceinline__ void load_weights(u32 stage, const u8* source, u32 blocks, u32 strips, u32 pitch, u32 bar) {
    ptx::mbarrier_arrive_expect(bar, blocks * strips * kBlockBytes);
    if (strips == kStrips) {
        ptx::bulk_load(stage, source, blocks * (kStrips * kBlockBytes), bar);
    } else {
        for (u32 b = 0; b < blocks; ++b) {
            ptx::bulk_load(stage + b * (kStrips * kBlockBytes), source + b * pitch, strips * kBlockBytes, bar);
        }
    }
}

template <class T, class Rows>
__device__ __forceinline__ void stream_weights(const Problem& problem, const Rows& rows, u32 shared) {
    Schedule<T, Rows> schedule(rows, shared, problem.strips());
    RingPosition at;
    Item item;
    while (schedule.next(item)) {
        const u32 pitch = smaller(problem.strips() - item.group * kStrips, kStrips) * kBlockBytes;  // of a k64 block
        const u8* source = problem.packed + item.expert * problem.expert_bytes() + item.group * problem.group_bytes() +
                           item.strip * kBlockBytes;
        for (u32 left = problem.k_blocks(); left > 0;) {
            const u32 blocks = smaller(left, T::stage_blocks);
            const u32 stage = shared + at.index * T::stage_bytes + T::token_bytes;
            ptx::mbarrier_wait(shared + T::empty + 8 * at.index, at.parity ^ 1);
            if (blocks < T::stage_blocks) zero_scales<T>(stage, blocks, threadIdx.x % 32);
            if (ptx::elect_one()) {
                load_weights<T>(stage, source, blocks, item.strips, pitch, shared + T::full + 8 * at.index);
            }
            __syncwarp();
            source += blocks * pitch;
            left -= blocks;
            at.template next<T::stages>();
        }
    }
}

// The rows that a gather warp copies: its lanes hold the source rows, and a copy takes one row's share of a stage
// (32 lanes of 16 bytes for four k64 blocks, 16 lanes for two, and so on).
template <class T>
struct Gather {
    static constexpr u32 kLanesPerRow = 8 * T::stage_blocks, kRowsPerPass = 32 / kLanesPerRow;
    static constexpr u32 kHeld = ceil_div(ceil_div(T::max_rows, T::gather_warps), 32u);

    u32 warp, lane;
    u32 pair[kHeld], source[kHeld];

    // Row of the tile that lane `index % 32` holds in pair[index / 32].
    __device__ __forceinline__ u32 row_of(u32 index) const {
        return (index / kRowsPerPass * T::gather_warps + warp) * kRowsPerPass + index % kRowsPerPass;
    }

    template <class Rows>
    __device__ __forceinline__ void look_up(const Item& item, const Rows& rows) {
#pragma unroll
        for (u32 h = 0; h < kHeld; ++h) {
            const u32 row = row_of(32 * h + lane);
            pair[h] = row < item.rows ? rows.pair(item.slot + row) : kNoRow;
        }
    }

    // Writes the rows' pairs and factors to the item's slot, and turns them into the rows to copy.
    template <class Rows>
    __device__ __forceinline__ void announce(const Item& item, const Rows& rows, const Problem& problem, u32 slot) {
#pragma unroll
        for (u32 h = 0; h < kHeld; ++h) {
            const u32 row = row_of(32 * h + lane);
            source[h] = pair[h] == kNoRow ? kNoRow : rows.source_row(pair[h]);
            if (row < item.width) {
                ptx::store_shared(slot + T::slot_ids + 4 * row, pair[h]);
                if (problem.row_weight != nullptr) {
                    const f32 factor = pair[h] == kNoRow ? 0.f : problem.row_weight[pair[h]];
                    ptx::store_shared(slot + T::slot_factors + 4 * row, __float_as_uint(factor));
                }
            }
        }
    }

    // Copies `blocks` k64 blocks of the rows, from byte `offset` of each row on, into a stage.
    __device__ __forceinline__ void copy(const Item& item, const Problem& problem, u32 stage, u32 offset, u32 blocks) const {
        const u32 block = lane % kLanesPerRow / 8, chunk = lane % 8, sub = lane / kLanesPerRow;
        const u32 target = stage + block * item.width * kTokenRowBytes;
        const u8* from = reinterpret_cast<const u8*>(problem.x) + offset + block * kTokenRowBytes + chunk * 16;
        const u32 passes = ceil_div(item.rows, kRowsPerPass * T::gather_warps);
#pragma unroll 4
        for (u32 pass = 0; pass < passes; ++pass) {
            const u32 index = pass * kRowsPerPass + sub, row = row_of(index);
            u32 from_row = __shfl_sync(kFullWarp, source[0], index % 32);
#pragma unroll
            for (u32 h = 1; h < kHeld; ++h) {
                const u32 other = __shfl_sync(kFullWarp, source[h], index % 32);
                from_row = index / 32 == h ? other : from_row;
            }
            const u32 to = target + row * kTokenRowBytes + (chunk ^ row % 8) * 16;
            if (from_row != kNoRow) {
                if (block < blocks) {
                    ptx::copy_async_16(to, from + u64{from_row} * (problem.k * 2));
                } else {
                    ptx::store_shared_v4(to, make_uint4(0, 0, 0, 0));
                }
            }
        }
    }
};

// Stages that a gather warp has copied and not yet handed over. Handing over waits for the copies, makes them visible to the
// tensor cores and arrives: two stages late, so that the wait is short, and by the few threads that copied.
template <class T>
class Handover {
public:
    static constexpr u32 kLate = 2;
    static_assert(kLate < T::stages && kLate < T::slots, "the math warps must be able to free what this waits for");

    __device__ __forceinline__ explicit Handover(u32 full) : full_(full) {}

    // Before a stage is waited for: the one copied kLate stages ago.
    __device__ __forceinline__ void hand_over_oldest() {
        if (held_ < kLate) return;
        ptx::copy_async_wait<kLate - 1>();
        arrive();
    }
    __device__ __forceinline__ void copied() {
        ptx::copy_async_commit();
        ++held_;
    }
    // Before anything else is waited for that the math warps may have to finish first.
    __device__ __forceinline__ void hand_over_all() {
        ptx::copy_async_wait<0>();
        while (held_ > 0) arrive();
    }

private:
    __device__ __forceinline__ void arrive() {
        ptx::async_proxy_fence();
        ptx::mbarrier_arrive(full_ + 8 * at_.index);
        at_.template next<T::stages>();
        --held_;
    }

    u32 full_, held_ = 0;
    RingPosition at_;
};

// The next item is looked up while the copies of the one before are under way, but not into the next window: the warp that
// streams weights would wait for this item's tokens, and this warp for that one's arrival at the window's barrier.
template <class T, class Rows>
__device__ __forceinline__ void gather_tokens(const Problem& problem, const Rows& rows, u32 shared) {
    Schedule<T, Rows> schedule(rows, shared, problem.strips());
    Gather<T> gather;
    gather.warp = threadIdx.x / 32 - T::math_warps - 1;
    gather.lane = threadIdx.x % 32;
    Handover<T> handover(shared + T::full);
    RingPosition at, slot;
    Item item, following;
    bool more = schedule.next(item);
    if (more) gather.look_up(item, rows);
    while (true) {
        const u32 place = shared + T::slot_base + slot.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_empty + 8 * slot.index, slot.parity ^ 1);
        if (gather.warp == 0 && gather.lane == 0) {
            const u32 output = item.group * (kStrips * kBlock) + item.strip * kBlock;
            ptx::store_shared_v4(place, more ? make_uint4(item.width, item.strips, output, 0) : make_uint4(0, 0, 0, 0));
        }
        if (more) gather.announce(item, rows, problem, place);
        ptx::mbarrier_arrive(shared + T::item_full + 8 * slot.index);
        if (!more) return;
        slot.template next<T::slots>();
        more = schedule.next_here(following);
        if (more) gather.look_up(following, rows);
        handover.hand_over_all();  // by now the last copies of the item before have landed
        u32 offset = 0;
        for (u32 left = problem.k_blocks(); left > 0;) {
            const u32 blocks = smaller(left, T::stage_blocks);
            handover.hand_over_oldest();
            ptx::mbarrier_wait(shared + T::empty + 8 * at.index, at.parity ^ 1);
            gather.copy(item, problem, shared + at.index * T::stage_bytes, offset, blocks);
            handover.copied();
            offset += blocks * kTokenRowBytes;
            left -= blocks;
            at.template next<T::stages>();
        }
        handover.hand_over_oldest();
        if (!more) {
            handover.hand_over_all();
            more = schedule.next(following);
            if (more) gather.look_up(following, rows);
        }
        item = following;
    }
}

}  // namespace gemm
