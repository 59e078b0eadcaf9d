// Programs: a body with one tile, or with several of different height, of which the rows that there are choose one on the
// device. A body makes the barriers, finds the first window of runs, and does the work.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// The first window of runs. What it is read from may come from the kernel before, as may the rows. By all producer threads.
template <class Body, class T, class Rows>
__device__ __forceinline__ Window first_window(const Rows& rows, u32 shared) {
    ptx::grid_launch_dependents();  // of a next kernel that waits for this one's end where it needs it
    ptx::grid_dependency_wait();
    return Body::template find_window<T>(rows, shared);
}

template <class Body, class T>
struct OneTile {
    static constexpr u32 threads = T::threads, smem_bytes = T::smem_bytes;

    template <class Rows>
    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows) {
        extern __shared__ __align__(1024) u8 memory[];
        const u32 shared = ptx::shared_address(memory);
        if (threadIdx.x == 0) Body::template init_barriers<T>(shared);
        __syncthreads();
        Body::template work<T>(problem, rows, shared, [&] { return first_window<Body, T>(rows, shared); });
    }
};

constexpr u32 kChoiceBarrier = 6;  // named barrier of all threads; 1 to 5 have other users

// A tile for experts of up to kMeanRows rows on average; 0: whatever they have.
template <class T, u32 kMeanRows>
struct FitTile {
    using Tile = T;
    static constexpr u32 mean_rows = kMeanRows;
};

// Rows of the runs in the lists, and runs that have any.
struct RowSum {
    u32 rows, runs;
    __device__ __forceinline__ bool at_most(u32 mean) const { return rows <= u64{mean} * runs; }
};

// By all producer threads, which find the same; the counts are in use until the next barrier.
template <class T>
__device__ __forceinline__ RowSum add_up_runs(u32 shared, u32 runs) {
    constexpr u32 kWarps = T::producer_threads / 32;
    const u32 thread = threadIdx.x - T::first_producer, counts = shared + T::run_counts;
    RowSum sum{0, 0};
    for (u32 run = thread; run < runs; run += T::producer_threads) {
        const u32 rows = ptx::load_shared(shared + T::run_rows + 4 * run);
        sum.rows += rows;
        sum.runs += rows > 0;
    }
    sum.rows = __reduce_add_sync(kFullWarp, sum.rows);
    sum.runs = __reduce_add_sync(kFullWarp, sum.runs);
    if (thread % 32 == 0) {
        ptx::store_shared(counts + 4 * (thread / 32), sum.rows);
        ptx::store_shared(counts + 4 * (kWarps + thread / 32), sum.runs);
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    sum = {0, 0};
#pragma unroll
    for (u32 warp = 0; warp < kWarps; ++warp) {
        sum.rows += ptx::load_shared(counts + 4 * warp);
        sum.runs += ptx::load_shared(counts + 4 * (kWarps + warp));
    }
    return sum;
}

// Chooses the first tile that the rows fit and makes its barriers. By one thread.
template <class Body, u32 kPlace, class First, class... Rest>
__device__ __forceinline__ void choose_tile(const RowSum& sum, u32 shared) {
    if constexpr (sizeof...(Rest) > 0) {
        if (!sum.at_most(First::mean_rows)) return choose_tile<Body, kPlace + 1, Rest...>(sum, shared);
    }
    ptx::store_shared(shared + First::Tile::choice, kPlace);
    Body::template init_barriers<typename First::Tile>(shared);
}

template <class Body, u32 kPlace, class First, class... Rest, class Rows>
__device__ __forceinline__ void work_chosen(const Problem& problem, const Rows& rows, u32 shared, u32 choice,
                                            const Window& window) {
    if constexpr (sizeof...(Rest) > 0) {
        if (choice != kPlace) return work_chosen<Body, kPlace + 1, Rest...>(problem, rows, shared, choice, window);
    }
    Body::template work<typename First::Tile>(problem, rows, shared, [&] { return window; });
}

// Tiles: FitTile, the lowest first. All have the same threads, the same producer and the lists of runs at the same place. Every
// CTA sees the same runs, so all choose alike; it is the first window's runs that decide.
template <class Body, class First, class... Rest>
struct FittingTiles {
    static constexpr u32 threads = First::Tile::threads, smem_bytes = First::Tile::smem_bytes;
    static_assert(((Rest::Tile::threads == threads) && ...), "one launch for all tiles");
    static_assert(((Rest::Tile::smem_bytes == smem_bytes) && ...), "one launch for all tiles");
    static_assert(((Rest::Tile::first_producer == First::Tile::first_producer) && ...), "one producer finds the runs");
    static_assert(((Rest::Tile::run_rows == First::Tile::run_rows) && ...), "one place for the runs");
    static_assert(((Rest::Tile::choice == First::Tile::choice) && ...), "one place for the choice");

    template <class Rows>
    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows) {
        using T = typename First::Tile;
        extern __shared__ __align__(1024) u8 memory[];
        const u32 shared = ptx::shared_address(memory);
        const u32 warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) - T::first_producer / 32;
        Window window{0, 0, true};
        if (warp < T::producer_threads / 32) {
            window = first_window<Body, T>(rows, shared);
            const RowSum sum = add_up_runs<T>(shared, window.runs);
            if (threadIdx.x == T::first_producer) choose_tile<Body, 0, First, Rest...>(sum, shared);
        }
        ptx::barrier_sync_aligned(kChoiceBarrier, threads);
        const u32 choice = __shfl_sync(kFullWarp, ptx::load_shared(shared + T::choice), 0);
        work_chosen<Body, 0, First, Rest...>(problem, rows, shared, choice, window);
    }
};

}  // namespace gemm
