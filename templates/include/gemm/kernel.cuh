// The W4A16 MoE GEMM: out[pair] = row_weight * (weights[expert] * x[row]), for the pairs of a row source.
// Persistent, warp-specialised: a producer warpgroup fills a ring of stages, four math warpgroups multiply one strip of 64
// outputs each over all of K. An output is summed by one warp in k order, whatever else is in the batch.
#pragma once
#include "common/types.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/loop.cuh"
#include "gemm/problem.cuh"
#include "gemm/producer.cuh"
#include "gemm/rows_few.cuh"
#include "gemm/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// Picks the code of the item's width: the widths are instructions, so each has its own loop and accumulators.
template <class T, template <class> class Loop, u32 kWidth = 8>
__device__ __forceinline__ void multiply_item(const Problem& problem, MathWarp<T>& warp, u32 width, u32 slot, u32 output) {
    if (width == kWidth) {
        f32 acc[kWidth / 2] = {};
        Loop<T>::template run<kWidth>(warp, acc);
#pragma unroll
        for (u32 i = 0; i < kWidth / 2; ++i) acc[i] *= kUnit;
        store_strip<T, kWidth>(problem, acc, warp.shared, slot, warp.group, output);
    } else if constexpr (kWidth < T::max_rows) {
        multiply_item<T, Loop, T::next_width(kWidth)>(problem, warp, width, slot, output);
    }
}

template <class T, template <class> class Loop>
__device__ __forceinline__ void multiply_items(const Problem& problem, u32 shared) {
    const u32 id = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    MathWarp<T> warp{shared, id / 4, id % 4, threadIdx.x % 32, ceil_div(problem.k_blocks(), T::stage_blocks), {}};
    RingPosition at;
    while (true) {
        const u32 slot = shared + T::slot_base + at.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_full + 8 * at.index, at.parity);
        const uint4 header = ptx::load_shared_v4(slot);  // width, strips, first output
        if (header.x == 0) break;
        if (warp.group < header.y) {
            multiply_item<T, Loop>(problem, warp, header.x, slot, header.z + warp.group * kBlock);
        } else {
            warp.skip_item();
        }
        __syncwarp();
        warp.release(shared + T::item_empty + 8 * at.index);
        at.template next<T::slots>();
    }
}

// The body with one of the main loops, for program.cuh.
template <template <class> class Loop>
struct StreamedBody {
    template <class T>
    static __device__ __forceinline__ void init_barriers(u32 shared) {
        for (u32 i = 0; i < T::barrier_stages; ++i) {
            ptx::mbarrier_init(shared + T::full + 8 * i, 1 + 32 * T::gather_warps);
            ptx::mbarrier_init(shared + T::empty + 8 * i, T::math_warps);
        }
        for (u32 i = 0; i < T::slots; ++i) {
            ptx::mbarrier_init(shared + T::item_full + 8 * i, 32 * T::gather_warps);
            ptx::mbarrier_init(shared + T::item_empty + 8 * i, T::math_warps);
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
        const u32 warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
        if (warp < T::math_warps) {
            Loop<T>::enter_math();
            multiply_items<T, Loop>(problem, shared);
        } else {
            Loop<T>::enter_producer();
            produce<T>(problem, rows, shared, first_window());
        }
    }
};

}  // namespace gemm
