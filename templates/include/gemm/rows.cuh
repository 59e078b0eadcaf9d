// Where an operator's token rows come from. A row source lists runs: consecutive row slots of one expert. Here: runs of
// blocks with an expert each, and the blocks of a route plan. Sorted rows and slabs: rows_grouped.cuh.
#pragma once
#include "common/types.cuh"
#include "ptx/copy.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace gemm {

constexpr u32 kNoRow = 0xffffffffu;
constexpr u32 kProducerBarrier = 5;  // named barrier of the producer's warps; 1 to 4 belong to the math warpgroups

struct Window {
    u32 runs;   // of the window
    u32 next;   // first block of the next window
    bool last;  // there is none
    u32 rows = 0, active = 0, widest = 0;  // what add_up_runs finds: rows of all runs, runs that have any, rows of the longest
    u32 tiles = 0;  // tiles, where they have been numbered already

    __device__ __forceinline__ bool mean_at_most(u32 mean) const { return rows <= u64{mean} * active; }
};

// The window with the sums of its lists. By all producer threads, which find the same.
template <class T>
__device__ __forceinline__ Window add_up_runs(Window window, u32 shared) {
    constexpr u32 kWarps = T::producer_threads / 32;
    static_assert(kWarps <= 4, "run_counts has room for the sums of four warps");
    const u32 thread = threadIdx.x - T::first_producer, counts = shared + T::run_counts;
    for (u32 run = thread; run < window.runs; run += T::producer_threads) {
        const u32 rows = ptx::load_shared(shared + T::run_rows + 4 * run);
        window.rows += rows;
        window.active += rows > 0;
        window.widest = larger(window.widest, rows);
    }
    const u32 sums[3] = {__reduce_add_sync(kFullWarp, window.rows), __reduce_add_sync(kFullWarp, window.active),
                         __reduce_max_sync(kFullWarp, window.widest)};
    if (thread % 32 == 0) {
        ptx::store_shared_v4(counts + 16 * (thread / 32), make_uint4(sums[0], sums[1], sums[2], 0));
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    window.rows = window.active = window.widest = 0;
#pragma unroll
    for (u32 warp = 0; warp < kWarps; ++warp) {
        const uint4 of_warp = ptx::load_shared_v4(counts + 16 * warp);
        window.rows += of_warp.x;
        window.active += of_warp.y;
        window.widest = larger(window.widest, of_warp.z);
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);  // before the counts are used again
    return window;
}

// Finds up to kWindow runs from block `first` on and writes them to the lists. By all producer threads.
// A run that goes on past the window is left to the next one, unless it fills the whole window. Of the source:
// expert(block), -1 beyond its end; ask_ahead(slot), for 32 slots; blocks(), which may wait for memory; block_m;
// num_experts, others make a block empty; filled_of_8(slot), 1 + the place of the last row among 8 slots or 0.
template <class T, class Source>
__device__ __forceinline__ Window load_block_runs(const Source& source, u32 shared, u32 first);

// Row slots are entries of sorted_ids; blocks of block_m slots belong to expert_ids[block]. Blocks of one expert that
// follow each other form one run. An expert outside [0, num_experts) makes its block empty; an id outside [0, num_pairs)
// marks a slot without a row. Every read is bounded by the capacities, whatever the plan says.
struct IndexedRows {
    const i32 *sorted_ids, *expert_ids, *num_tokens_post_padded;
    u32 num_slots, num_blocks;  // capacities of sorted_ids and expert_ids
    u32 block_m, num_experts, num_pairs, top_k;

    // Pair of a slot, or kNoRow.
    __device__ __forceinline__ u32 pair(u32 slot) const {
        const u32 id = slot < num_slots ? static_cast<u32>(sorted_ids[slot]) : kNoRow;
        return id < num_pairs ? id : kNoRow;
    }
    __device__ __forceinline__ u32 source_row(u32 pair) const { return pair / top_k; }

    template <class T>
    __device__ __forceinline__ Window load_window(u32 shared, u32 first) const {
        return load_block_runs<T>(*this, shared, first);
    }

    __device__ __forceinline__ i32 expert(u32 block) const { return block < num_blocks ? expert_ids[block] : -1; }
    __device__ __forceinline__ void ask_ahead(u32 slot) const {
        if (slot < num_slots) ptx::prefetch_line(sorted_ids + slot);
    }
    __device__ __forceinline__ u32 blocks() const {
        const i32 padded = *num_tokens_post_padded;
        return padded > 0 ? smaller(ceil_div(static_cast<u32>(padded), block_m), num_blocks) : 0;
    }
    __device__ __forceinline__ u32 filled_of_8(u32 slot) const {
        u32 filled = 0;
        if (slot + 8 <= num_slots) {
            const uint4 low = ptx::load_readonly_v4(sorted_ids + slot), high = ptx::load_readonly_v4(sorted_ids + slot + 4);
            const u32 ids[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i) filled = ids[i] < num_pairs ? i + 1 : filled;
        } else {
            for (u32 i = 0; i < 8; ++i) filled = pair(slot + i) != kNoRow ? i + 1 : filled;
        }
        return filled;
    }
};

// From blocks to rows: slots up to a run's last row. Only the last block of a run has to be looked into.
template <class T, class Source>
__device__ __forceinline__ void fill_rows(const Source& source, u32 shared, u32 runs) {
    const u32 thread = threadIdx.x - T::first_producer, block_m = source.block_m, eighths = block_m / 8;
    for (u32 i = thread; i < runs * eighths; i += T::producer_threads) {
        const u32 run = i / eighths, place = (i - run * eighths) * 8;
        const u32 block = ptx::load_shared(shared + T::run_tile + 4 * run) - 1;
        const u32 filled = source.filled_of_8(block * block_m + place);
        if (filled > 0) ptx::max_shared(shared + T::run_rows + 4 * run, place + filled);
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    for (u32 run = thread; run < runs; run += T::producer_threads) {
        const u32 start = ptx::load_shared(shared + T::run_slot + 4 * run);
        const u32 whole = ptx::load_shared(shared + T::run_tile + 4 * run) - 1 - start;
        const u32 filled = ptx::load_shared(shared + T::run_rows + 4 * run);
        ptx::store_shared(shared + T::run_slot + 4 * run, start * block_m);
        ptx::store_shared(shared + T::run_rows + 4 * run, whole * block_m + filled);
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
}

// Goes through chunks of blocks, a block a thread: where the expert changes, a run stops, and one starts if the new one is
// an expert. Ends with the plan, or when the next chunk might bring more runs than the lists hold, or takes too long.
template <class T, class Source>
__device__ __forceinline__ Window load_block_runs(const Source& source, u32 shared, u32 first) {
    constexpr u32 kThreads = T::producer_threads, kWarps = kThreads / 32, kMostChunks = 32;
    const u32 thread = threadIdx.x - T::first_producer, warp = thread / 32, lane = thread % 32;
    // Loads that do not wait for the number of blocks; the rows of the last blocks are asked for ahead of time too.
    i32 here = source.expert(first + thread), next = source.expert(first + kThreads + thread);
    i32 before_here = thread > 0 ? source.expert(first + thread - 1) : -1;
    i32 before_next = source.expert(first + kThreads + thread - 1);
    source.ask_ahead(first * source.block_m + thread * 32);
    const u32 blocks = source.blocks();

    u32 runs = 0, chunk = 0;
    do {
        const u32 block = first + chunk * kThreads + thread, counts = shared + T::run_counts + chunk % 2 * (4 * kWarps);
        const i32 after_next = source.expert(block + 2 * kThreads);
        const i32 before_after_next = source.expert(block + 2 * kThreads - 1);
        const bool starts = block < blocks && static_cast<u32>(here) < source.num_experts && here != before_here;
        const bool stops = block <= blocks && static_cast<u32>(before_here) < source.num_experts &&
                           (block == blocks || here != before_here);
        const u32 started = __ballot_sync(kFullWarp, starts);
        if (lane == 0) ptx::store_shared(counts + 4 * warp, __popc(started));
        ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
        u32 run = runs + __popc(started & ptx::lanes_below());  // runs that started before this block
#pragma unroll
        for (u32 i = 0; i < kWarps; ++i) {
            const u32 count = ptx::load_shared(counts + 4 * i);
            run += i < warp ? count : 0;
            runs += count;
        }
        // For now run_slot holds the first block of a run, run_tile the block after its last.
        if (stops) ptx::store_shared(shared + T::run_tile + 4 * (run - 1), block);
        if (starts) {
            ptx::store_shared(shared + T::run_slot + 4 * run, block);
            ptx::store_shared(shared + T::run_expert + 4 * run, static_cast<u32>(here));
            ptx::store_shared(shared + T::run_rows + 4 * run, 0);
        }
        here = next, before_here = before_next, next = after_next, before_next = before_after_next;
        ++chunk;
    } while (first + chunk * kThreads <= blocks && runs + kThreads <= T::window && chunk < kMostChunks);

    u32 end = first + chunk * kThreads;
    const bool last = end > blocks;
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
    if (!last && static_cast<u32>(source.expert(end - 1)) < source.num_experts) {  // the last run may go on
        const u32 start = ptx::load_shared(shared + T::run_slot + 4 * (runs - 1));
        if (start > first) {
            --runs;
            end = start;
        } else {
            if (thread == 0) ptx::store_shared(shared + T::run_tile + 4 * (runs - 1), end);
            ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
        }
    }
    fill_rows<T>(source, shared, runs);
    return {runs, end, last};
}

}  // namespace gemm
