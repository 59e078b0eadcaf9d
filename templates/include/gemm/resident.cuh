// The W4A16 MoE GEMM for a small K, turned inside out: out[pair] = row_weight * (weights[expert] * x[row]), where a tile of rows
// stays in shared memory for all of K and strips of 64 outputs of weights stream past it. Warps of their own store, so that
// the tensor cores never wait for an output. An output is summed by one warp in k order, whatever else is in the batch.
#pragma once
#include "common/types.cuh"
#include "gemm/problem.cuh"
#include "gemm/resident_math.cuh"
#include "gemm/resident_producer.cuh"
#include "gemm/resident_store.cuh"
#include "gemm/resident_tile.cuh"
#include "gemm/rows_few.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace gemm {

// The body for program.cuh.
struct ResidentBody {
    template <class T>
    static __device__ __forceinline__ void init_barriers(u32 shared) {
        for (u32 i = 0; i < T::max_stages; ++i) {
            ptx::mbarrier_init(shared + T::full + 8 * i, 1);
            ptx::mbarrier_init(shared + T::empty + 8 * i, 4);  // the warps of the warpgroup whose strip it was
        }
        for (u32 i = 0; i < T::slots; ++i) {
            ptx::mbarrier_init(shared + T::item_full + 8 * i, 32 * T::gather_warps);
            ptx::mbarrier_init(shared + T::item_empty + 8 * i, T::math_threads + 32 * T::all_store_warps);
        }
        for (u32 i = 0; i < T::buffers; ++i) ptx::mbarrier_init(shared + T::tokens_empty + 8 * i, T::math_threads);
        for (u32 i = 0; i < T::groups; ++i) {
            ptx::mbarrier_init(shared + T::staged_full + 8 * i, 4);
            ptx::mbarrier_init(shared + T::staged_empty + 8 * i, T::store_warps);
        }
        ptx::mbarrier_init_fence();
    }

    template <class T, class Rows>
    static __device__ __forceinline__ Window find_window(const Rows& rows, u32 shared) {
        Window window;
        if (find_few<T>(rows, shared, window)) return window;
        return add_up_runs<T>(find_runs<T>(rows, shared, 0), shared);
    }

    // What a thread does once the barriers are there. `first_window` gives the producer's threads the first window.
    template <class T, class Rows, class Opened>
    static __device__ __forceinline__ void work(const Problem& problem, const Rows& rows, u32 shared,
                                                const Opened& first_window) {
        const u32 warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
        if (warp < T::math_warps) {
            ptx::take_registers<T::math_registers>();
            multiply_parts<T>(problem, shared);
            return;
        }
        const u32 helper = warp - T::first_producer / 32;
        if (helper < T::producer_warps) {
            ptx::keep_registers<T::producer_registers>();
            produce<T>(problem, rows, shared, helper, first_window());
        } else {
            ptx::keep_registers<T::store_registers>();
            if (helper < T::producer_warps + T::all_store_warps) store_parts<T>(problem, shared, helper - T::producer_warps);
        }
    }
};

}  // namespace gemm
