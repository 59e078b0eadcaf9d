// Programs: a body with one tile, or with several of different height, of which the rows that there are choose one on the
// device. A body makes the barriers, finds the first window of runs, and does the work.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// The first window of runs. What it is read from may come from the kernel before, as may the rows. By all producer threads.
template <class Body, class T, class Rows>
__device__ __forceinline__ Window first_window(const Rows& rows, u32 shared) {
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

// A tile for experts of more than kBeyond rows on average.
template <class T, u32 kBeyond>
struct FitTile {
    using Tile = T;
    static constexpr u32 beyond = kBeyond;
};

// The first tile that a window's rows are enough for: its place among the program's. The last one takes what is left.
template <u32 kPlace, class First, class... Rest>
__device__ __forceinline__ u32 fitting_tile(const Window& window) {
    if constexpr (sizeof...(Rest) > 0) {
        return window.mean_at_most(First::beyond) ? fitting_tile<kPlace + 1, Rest...>(window) : kPlace;
    }
    return kPlace;
}

// The compiler may not make a jump table of it, and lays the last tile's code next to that before the choice: few rows, for which
// fetching code counts most.
template <class Body, u32 kPlace, class First, class... Rest, class Rows>
__device__ __forceinline__ void work_chosen(const Problem& problem, const Rows& rows, u32 shared, u32 choice,
                                            const Window& window) {
    if (sizeof...(Rest) == 0 || __builtin_expect(ptx::opaque(choice) == kPlace, kPlace == 0)) {
        Body::template work<typename First::Tile>(problem, rows, shared, [&] { return window; });
    } else if constexpr (sizeof...(Rest) > 0) {
        work_chosen<Body, kPlace + 1, Rest...>(problem, rows, shared, choice, window);
    }
}

// Tiles: FitTile, the tallest first. All have the same threads, the same producer and the lists of runs at the same place. Every
// CTA sees the same runs, so all choose alike; it is the first window's runs that decide.
template <class Body, class First, class... Rest>
struct FittingTiles {
    static constexpr u32 threads = First::Tile::threads, smem_bytes = First::Tile::smem_bytes;
    static_assert(((Rest::Tile::threads == threads) && ...), "one launch for all tiles");
    static_assert(((Rest::Tile::smem_bytes == smem_bytes) && ...), "one launch for all tiles");
    static_assert(((Rest::Tile::first_producer == First::Tile::first_producer) && ...), "one producer finds the runs");
    static_assert(((Rest::Tile::full == First::Tile::full) && ...), "one place for the barriers");
    static_assert(((Rest::Tile::run_rows == First::Tile::run_rows) && ...), "one place for the runs");
    static_assert(First::Tile::chosen % 8 == 0, "a barrier has 8 bytes and stands on such a border");
    static_assert(((Rest::Tile::choice == First::Tile::choice) && ...), "one place for the choice");

    // The producer chooses and goes on; all others wait for what it has chosen. By an mbarrier, at which the thread that stores the
    // choice arrives itself: a named barrier that some arrive at and others wait at orders the same, but racecheck reports it.
    template <class Rows>
    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows) {
        using T = typename First::Tile;
        extern __shared__ __align__(1024) u8 memory[];
        const u32 shared = ptx::shared_address(memory);
        if (threadIdx.x == 0) {
            Body::template init_barriers<T>(shared);
            ptx::mbarrier_init(shared + T::chosen, 1);
        }
        __syncthreads();
        const u32 warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) - T::first_producer / 32;
        Window window{0, 0, true};
        u32 choice;
        if (warp < T::producer_threads / 32) {
            window = first_window<Body, T>(rows, shared);
            choice = fitting_tile<0, First, Rest...>(window);
            if (threadIdx.x == T::first_producer) {
                ptx::store_shared(shared + T::choice, choice);
                ptx::mbarrier_arrive(shared + T::chosen);
            }
            __syncwarp();
        } else {
            ptx::mbarrier_wait(shared + T::chosen, 0);
            choice = ptx::load_shared(shared + T::choice);
        }
        work_chosen<Body, 0, First, Rest...>(problem, rows, shared, __shfl_sync(kFullWarp, choice, 0), window);
    }
};

}  // namespace gemm
