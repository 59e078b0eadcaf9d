// The window of a plan that has room for 32 blocks at most, a block a lane: what rows.cuh finds in eight steps with barriers
// between them, each warp finds by ballots and shuffles, and the loads do not wait for one another.
#pragma once
#include "common/types.cuh"
#include "gemm/rows.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace gemm {

constexpr u32 kFewBlocks = 32, kFewBlockRows = 16;
constexpr u32 kLeastTile = 16;  // rows of the lowest of all programs' tallest tiles

// The only window, with the sums of its lists and their tiles. `source` has at most kFewBlocks blocks. By all producer threads.
template <class T>
__device__ __forceinline__ Window few_block_runs(const IndexedRows& source, u32 shared) {
    const u32 thread = threadIdx.x - T::first_producer, lane = thread % 32, first_slot = lane * source.block_m;
    const i32 expert = source.expert(lane), padded = *source.num_tokens_post_padded;
    u32 filled = 0;
    for (u32 place = 0; place < source.block_m; place += 8) {
        const u32 of_8 = source.filled_of_8(first_slot + place);
        filled = of_8 > 0 ? place + of_8 : filled;
    }
    const bool exists = static_cast<i32>(first_slot) < padded && static_cast<u32>(expert) < source.num_experts;
    const i32 mine = exists ? expert : -1;
    const i32 before = __shfl_up_sync(kFullWarp, mine, 1), after = __shfl_down_sync(kFullWarp, mine, 1);
    const bool starts = exists && (lane == 0 || mine != before), stops = exists && (lane == 31 || mine != after);
    const u32 all_starts = __ballot_sync(kFullWarp, starts), upto = all_starts & (ptx::lanes_below() | 1u << lane);
    const u32 start = 31 - __clz(upto | 1u), run = __popc(upto) - 1;  // of the run that this block belongs to
    const u32 rows = stops ? (lane - start) * source.block_m + filled : 0;
    const u32 has_rows = __ballot_sync(kFullWarp, rows > 0);
    if (stops && thread < 32) {
        ptx::store_shared(shared + T::run_slot + 4 * run, start * source.block_m);
        ptx::store_shared(shared + T::run_rows + 4 * run, rows);
        ptx::store_shared(shared + T::run_expert + 4 * run, static_cast<u32>(expert));
        ptx::store_shared(shared + T::run_tile + 4 * run, static_cast<u32>(__popc(has_rows & ptx::lanes_below())));
    }
    Window window{static_cast<u32>(__popc(all_starts)), kFewBlocks, true};
    window.rows = __reduce_add_sync(kFullWarp, rows);
    window.active = __popc(has_rows);
    window.widest = __reduce_max_sync(kFullWarp, rows);
    window.tiles = window.widest <= kLeastTile ? window.active : 0;  // one for each run that has rows, whichever tile it is
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);  // the lists are there
    return window;
}

// Whether the rows could be looked at in one step; `window` is the first and only one then. By all producer threads.
template <class T, class Rows>
__device__ __forceinline__ bool find_few(const Rows&, u32, Window&) {
    return false;
}

template <class T>
__device__ __forceinline__ bool find_few(const IndexedRows& rows, u32 shared, Window& window) {
    if (rows.num_blocks > kFewBlocks || rows.block_m > kFewBlockRows) return false;
    window = few_block_runs<T>(rows, shared);
    return true;
}

// The first window of a source with block runs or expert runs, added up.
template <class T, class Rows>
__device__ __forceinline__ Window find_first_window(const Rows& rows, u32 shared) {
    Window window;
    if (find_few<T>(rows, shared, window)) return window;
    return add_up_runs<T>(rows.template load_window<T>(shared, 0), shared);
}

}  // namespace gemm
