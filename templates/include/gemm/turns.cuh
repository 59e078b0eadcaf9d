// The W4A16 MoE GEMM for few items: an item is one strip of 64 outputs, and the four math warpgroups take the stages of its K in
// turn. What is slow for one warpgroup, dequantising, they do side by side, each its stage; the sums go from one to the next
// through shared memory, so that an output is still summed in k order: the bits of the wgmma arms. An item's first stages do
// not wait for the last ones of the item before.
#pragma once
#include "common/types.cuh"
#include "gemm/dequantize.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/problem.cuh"
#include "gemm/producer.cuh"
#include "gemm/rows.cuh"
#include "gemm/rows_few.cuh"
#include "gemm/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace gemm {

constexpr u32 kTurnGroups = 4, kTurnThreads = 128;  // math warpgroups that take turns, and the threads of one

template <u32 kMaxRows, u32 kStageBlocks, u32 kStages, u32 kSlots, u32 kWindow>
struct TurnTile : Tile<kMaxRows, kStageBlocks, kStages, kSlots, kWindow, 0, 1> {
    using Base = Tile<kMaxRows, kStageBlocks, kStages, kSlots, kWindow, 0, 1>;

    // Sums for each warpgroup to start from: [4 of a thread's][thread] of 16 bytes. Two barriers each: they are there, they are read.
    static constexpr u32 sums = round_up(Base::smem_bytes, 16u), sums_bytes = kMaxRows * kBlock * 4;
    static constexpr u32 handed = sums + kTurnGroups * sums_bytes, taken = handed + 8 * kTurnGroups;
    static constexpr u32 smem_bytes = taken + 8 * kTurnGroups;

    static_assert(kMaxRows == 8 || kMaxRows == 16, "all fragments of a stage must find room beside the sums");
    static_assert(kStages > kTurnGroups, "stages are loaded while each warpgroup holds one");
};

// State of a math warp: the ring's place of its warpgroup's next stage, and the parities of the sums that it gets and hands on.
template <class T>
struct TurnWarp {
    u32 shared, group, warp, lane;
    u32 index, parity, handed_parity, taken_parity;
    u32 own_sums, next_sums;  // this thread's place of the sums that it gets and hands on

    __device__ __forceinline__ explicit TurnWarp(u32 shared_)
        : shared(shared_), lane(threadIdx.x % 32), parity(0), handed_parity(0), taken_parity(1) {
        const u32 id = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
        group = id / 4, warp = id % 4;
        index = group;
        own_sums = ptx::opaque(sums_of(group)), next_sums = ptx::opaque(sums_of(following()));
    }
    __device__ __forceinline__ u32 tokens() const { return shared + index * T::stage_bytes; }
    __device__ __forceinline__ u32 following() const { return (group + 1) % kTurnGroups; }
    __device__ __forceinline__ u32 sums_of(u32 other) const {
        return shared + T::sums + other * T::sums_bytes + warp * 512 + lane * 16;
    }
    // The weights of the next stage as fragments; its token rows are there then, too.
    __device__ __forceinline__ void dequantize_stage(u32 (&a)[T::stage_blocks][4][4]) const {
        ptx::mbarrier_wait(shared + T::full + 8 * index, parity);
        ptx::async_proxy_fence();
#pragma unroll
        for (u32 block = 0; block < T::stage_blocks; ++block) {
            dequantize(a[block], Words(tokens() + T::token_bytes + block * kBlockBytes, warp, lane));
        }
    }
    __device__ __forceinline__ void release_stage() {
        ptx::mbarrier_arrive(shared + T::empty + 8 * index);
        index += kTurnGroups;
        if (index >= T::stages) {
            index -= T::stages;
            parity ^= 1;
        }
    }

    // The sums of the stages before, from the warpgroup before.
    template <u32 kCount>
    __device__ __forceinline__ void take_sums(f32 (&acc)[kCount]) {
        ptx::mbarrier_wait(shared + T::handed + 8 * group, handed_parity);
        handed_parity ^= 1;
#pragma unroll
        for (u32 i = 0; i < kCount; i += 4) {
            const uint4 v = ptx::load_shared_v4(own_sums + i / 4 * 2048);
            acc[i] = __uint_as_float(v.x), acc[i + 1] = __uint_as_float(v.y);
            acc[i + 2] = __uint_as_float(v.z), acc[i + 3] = __uint_as_float(v.w);
        }
    }
    __device__ __forceinline__ void tell_taken() const { ptx::mbarrier_arrive(shared + T::taken + 8 * group); }
    // Waits until the warpgroup behind this one has read what it was handed last.
    __device__ __forceinline__ void wait_for_room() {
        ptx::mbarrier_wait(shared + T::taken + 8 * following(), taken_parity);
        taken_parity ^= 1;
    }
    template <u32 kCount>
    __device__ __forceinline__ void hand_on(const f32 (&acc)[kCount]) const {
#pragma unroll
        for (u32 i = 0; i < kCount; i += 4) {
            ptx::store_shared_v4(next_sums + i / 4 * 2048,
                                 make_uint4(__float_as_uint(acc[i]), __float_as_uint(acc[i + 1]),
                                            __float_as_uint(acc[i + 2]), __float_as_uint(acc[i + 3])));
        }
        ptx::mbarrier_arrive(shared + T::handed + 8 * following());
    }
};

// One stage: acc = sums so far + weights * tokens, k16 after k16. Everything that need not wait for the sums is done before.
template <class T, u32 kWidth>
__device__ __forceinline__ void take_turn(TurnWarp<T>& warp, f32 (&acc)[kWidth / 2], bool first, bool last) {
    u32 a[T::stage_blocks][4][4];
    warp.dequantize_stage(a);
    const u64 tokens = ptx::wgmma_operand(warp.tokens());
    if (!last) warp.wait_for_room();
    if (first) {
#pragma unroll
        for (u32 i = 0; i < kWidth / 2; ++i) acc[i] = 0.f;
    } else {
        warp.take_sums(acc);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (u32 block = 0; block < T::stage_blocks; ++block) {
#pragma unroll
        for (u32 step = 0; step < 4; ++step) {
            ptx::Wgmma<kWidth>::add(acc, a[block][step], tokens + (block * (T::token_block_bytes / 16) + step * 2));
        }
    }
    ptx::wgmma_commit();
    if (!first) warp.tell_taken();
    ptx::wgmma_wait<0>();
    if (!last) warp.hand_on(acc);
    warp.release_stage();
}

// This warpgroup's stages of an item of `stages`, from stage `next` on; returns the first one beyond the item, from its end.
template <class T, u32 kWidth = 8>
__device__ __forceinline__ u32 take_turns(const Problem& problem, TurnWarp<T>& warp, uint4 header, u32 next, u32 stages, u32 slot) {
    if (header.x == kWidth) {
        for (; next < stages; next += kTurnGroups) {
            const bool last = next + 1 == stages;
            f32 acc[kWidth / 2];
            take_turn<T, kWidth>(warp, acc, next == 0, last);
            if (last) {
#pragma unroll
                for (u32 i = 0; i < kWidth / 2; ++i) acc[i] *= kUnit;
                store_strip<T, kWidth>(problem, acc, warp.shared, slot, warp.group, header.z);
            }
        }
        return next - stages;
    }
    if constexpr (kWidth < T::max_rows) return take_turns<T, T::next_width(kWidth)>(problem, warp, header, next, stages, slot);
    return next;
}

template <class T>
__device__ __forceinline__ void take_turns_of_items(const Problem& problem, u32 shared) {
    TurnWarp<T> warp(shared);
    const u32 stages = ceil_div(problem.k_blocks(), T::stage_blocks);
    RingPosition at;
    u32 next = warp.group;
    while (true) {
        const u32 slot = shared + T::slot_base + at.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_full + 8 * at.index, at.parity);
        const uint4 header = ptx::load_shared_v4(slot);  // width, strips, first output
        if (header.x == 0) break;
        next = take_turns<T>(problem, warp, header, next, stages, slot);
        ptx::mbarrier_arrive(shared + T::item_empty + 8 * at.index);
        at.template next<T::slots>();
    }
}

// The body for program.cuh. Every thread arrives for itself: racecheck does not see that a warp's barrier orders what others read.
struct TurnBody {
    template <class T>
    static __device__ __forceinline__ void init_barriers(u32 shared) {
        for (u32 i = 0; i < T::stages; ++i) {
            ptx::mbarrier_init(shared + T::full + 8 * i, 1 + 32 * T::gather_warps);
            ptx::mbarrier_init(shared + T::empty + 8 * i, kTurnThreads);  // of the warpgroup whose stage it was
        }
        for (u32 i = 0; i < T::slots; ++i) {
            ptx::mbarrier_init(shared + T::item_full + 8 * i, 32 * T::gather_warps);
            ptx::mbarrier_init(shared + T::item_empty + 8 * i, T::math_threads);
        }
        for (u32 i = 0; i < kTurnGroups; ++i) {
            ptx::mbarrier_init(shared + T::handed + 8 * i, kTurnThreads);
            ptx::mbarrier_init(shared + T::taken + 8 * i, kTurnThreads);
        }
        ptx::mbarrier_init_fence();
    }

    template <class T, class Rows>
    static __device__ __forceinline__ Window find_window(const Rows& rows, u32 shared) {
        return find_first_window<T>(rows, shared);
    }

    // What a thread does once the barriers are there. `first_window` gives the producer's threads the first window.
    template <class T, class Rows, class Opened>
    static __device__ __forceinline__ void work(const Problem& problem, const Rows& rows, u32 shared,
                                                const Opened& first_window) {
        // 640 threads enter with 96 registers each, which a stage's fragments and the sums of 16 rows do not fit.
        if (__shfl_sync(kFullWarp, threadIdx.x / 32, 0) < T::math_warps) {
            ptx::take_registers<104>();
            take_turns_of_items<T>(problem, shared);
        } else {
            ptx::keep_registers<64>();
            produce<T>(problem, rows, shared, first_window());
        }
    }
};

}  // namespace gemm
