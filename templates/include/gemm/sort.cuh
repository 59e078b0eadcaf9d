// The order of a window's runs: those with the widest tiles first, and as the plan has them among equals, so that every
// CTA finds the same order.
#pragma once
#include "common/types.cuh"
#include "gemm/cut.cuh"
#include "gemm/rows.cuh"
#include "gemm/tile.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace gemm {

template <class T>
struct RowCut : EvenCut {
    __device__ __forceinline__ explicit RowCut(u32 rows) : EvenCut(rows, T::max_rows) {}
};

// Turns `count` numbers of shared memory into the sums of those before each. By all producer threads.
template <class T, u32 kCount>
__device__ __forceinline__ void exclusive_sums(u32 numbers, u32 warp_sums) {
    constexpr u32 kEach = ceil_div(kCount, T::producer_threads), kWarps = T::producer_threads / 32;
    const u32 thread = threadIdx.x - T::math_threads, lane = thread % 32, warp = thread / 32;
    u32 sums[kEach], sum = 0;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
        sums[i] = sum;
        sum += thread * kEach + i < kCount ? ptx::load_shared(numbers + 4 * (thread * kEach + i)) : 0;
    }
    u32 upto = sum;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(kFullWarp, upto, step);
        upto += lane >= step ? other : 0;
    }
    if (lane == 31) ptx::store_shared(warp_sums + 4 * warp, upto);
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    u32 before = upto - sum;
#pragma unroll
    for (u32 w = 0; w + 1 < kWarps; ++w) before += w < warp ? ptx::load_shared(warp_sums + 4 * w) : 0;
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
        if (thread * kEach + i < kCount) ptx::store_shared(numbers + 4 * (thread * kEach + i), before + sums[i]);
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
}

// Up to 24 rows device memory sets the pace, whatever the width, and a sort costs 1 us.
constexpr u32 kSortedRows = 24;

// Whether any run has more than `rows` rows. By all producer threads.
template <class T>
__device__ __forceinline__ bool wider_than(u32 rows, u32 shared, u32 runs) {
    const u32 thread = threadIdx.x - T::math_threads;
    bool wider = false;
    for (u32 run = thread; run < runs; run += T::producer_threads) {
        wider = wider || ptx::load_shared(shared + T::run_rows + 4 * run) > rows;
    }
    const u32 lanes = __ballot_sync(kFullWarp, wider);
    if (thread % 32 == 0) ptx::store_shared(shared + T::run_counts + 4 * (thread / 32), lanes);
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    u32 any = 0;
#pragma unroll
    for (u32 warp = 0; warp < T::producer_threads / 32; ++warp) any |= ptx::load_shared(shared + T::run_counts + 4 * warp);
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);  // before the counts are used again
    return any != 0;
}

// How a run is counted: where the count of its width is kept for its piece of 32 runs, and how many like it the piece has
// before it. By whole warps.
template <class T>
struct SortPlace {
    static constexpr u32 kPieces = T::window / 32, kWidths = T::max_rows / 8 + 1;
    u32 count, before, alike;
    __device__ __forceinline__ SortPlace(u32 shared, u32 runs, u32 run) {
        const u32 rows = run < runs ? ptx::load_shared(shared + T::run_rows + 4 * run) : 0;
        const u32 narrower = kWidths - 1 - ceil_div(RowCut<T>(rows).tile_rows, 8u);  // than the widest, in steps of 8
        const u32 lanes = __match_any_sync(kFullWarp, narrower);
        count = shared + T::run_tile + 4 * (narrower * kPieces + run / 32);
        before = __popc(lanes & ptx::lanes_below());
        alike = __popc(lanes);
    }
};

// A stable counting sort of the lists by the width of a run's tiles. run_tile holds the counts meanwhile.
template <class T>
__device__ __forceinline__ void sort_runs(u32 shared, u32 runs) {
    using Place = SortPlace<T>;
    constexpr u32 kThreads = T::producer_threads, kEach = T::window / kThreads, kCounts = Place::kWidths * Place::kPieces;
    static_assert(kCounts <= T::window, "the counts must fit their place");
    const u32 thread = threadIdx.x - T::math_threads;
#pragma unroll 1
    for (u32 i = thread; i < kCounts; i += kThreads) ptx::store_shared(shared + T::run_tile + 4 * i, 0);
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
#pragma unroll 1
    for (u32 first = 0; first < runs; first += kThreads) {
        const Place place(shared, runs, first + thread);
        if (place.before == 0) ptx::store_shared(place.count, place.alike);
    }
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
    exclusive_sums<T, kCounts>(shared + T::run_tile, shared + T::run_counts);
    u32 to[kEach];
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
        const Place place(shared, runs, j * kThreads + thread);
        to[j] = ptx::load_shared(place.count) + place.before;
    }
#pragma unroll 1
    for (u32 list = shared + T::run_slot; list <= shared + T::run_expert; list += T::run_rows - T::run_slot) {
        u32 value[kEach];
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) value[j] = ptx::load_shared(list + 4 * (j * kThreads + thread));
        ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) {
            if (j * kThreads + thread < runs) ptx::store_shared(list + 4 * to[j], value[j]);
        }
    }
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
}

}  // namespace gemm
