// Where an operator's token rows come from. A row source lists runs: consecutive row slots of one expert.
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
    u32 next;   // first routing block of the next window
    bool last;  // there is none
};

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

    // Finds up to kWindow runs from block `first` on and writes them to the lists. By all producer threads.
    // A run that goes on past the window is left to the next one, unless it fills the whole window.
    template <class T>
    __device__ __forceinline__ Window load_window(u32 shared, u32 first) const;

private:
    __device__ __forceinline__ i32 expert(u32 block) const { return block < num_blocks ? expert_ids[block] : -1; }

    // 1 + the place of the last row among the 8 slots from `slot` on, 0 if they hold none.
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

    template <class T>
    __device__ __forceinline__ void fill_rows(u32 shared, u32 runs) const;
};

// Goes through chunks of blocks, a block a thread: where the expert changes, a run stops, and one starts if the new one is
// an expert. Ends with the plan, or when the next chunk might bring more runs than the lists hold, or takes too long.
template <class T>
__device__ __forceinline__ Window IndexedRows::load_window(u32 shared, u32 first) const {
    constexpr u32 kThreads = T::producer_threads, kWarps = kThreads / 32, kMostChunks = 32;
    const u32 thread = threadIdx.x - T::math_threads, warp = thread / 32, lane = thread % 32;
    // Loads that do not wait for the number of blocks; the rows of the last blocks are asked for ahead of time too.
    i32 here = expert(first + thread), next = expert(first + kThreads + thread);
    i32 before_here = thread > 0 ? expert(first + thread - 1) : -1, before_next = expert(first + kThreads + thread - 1);
    const u32 line = first * block_m + thread * 32;  // of 32 slots
    if (line < num_slots) ptx::prefetch_line(sorted_ids + line);
    const i32 padded = *num_tokens_post_padded;
    const u32 blocks = padded > 0 ? smaller((static_cast<u32>(padded) + block_m - 1) / block_m, num_blocks) : 0;

    u32 runs = 0, chunk = 0;
    do {
        const u32 block = first + chunk * kThreads + thread, counts = shared + T::run_counts + chunk % 2 * (4 * kWarps);
        const i32 after_next = expert(block + 2 * kThreads), before_after_next = expert(block + 2 * kThreads - 1);
        const bool starts = block < blocks && static_cast<u32>(here) < num_experts && here != before_here;
        const bool stops = block <= blocks && static_cast<u32>(before_here) < num_experts &&
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
    if (!last && static_cast<u32>(expert(end - 1)) < num_experts) {  // the last run may go on
        const u32 start = ptx::load_shared(shared + T::run_slot + 4 * (runs - 1));
        if (start > first) {
            --runs;
            end = start;
        } else {
            if (thread == 0) ptx::store_shared(shared + T::run_tile + 4 * (runs - 1), end);
            ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
        }
    }
    fill_rows<T>(shared, runs);
    return {runs, end, last};
}

// From blocks to rows: slots up to a run's last row. Only the last block of a run has to be looked into.
template <class T>
__device__ __forceinline__ void IndexedRows::fill_rows(u32 shared, u32 runs) const {
    const u32 thread = threadIdx.x - T::math_threads, eighths = block_m / 8;
    for (u32 i = thread; i < runs * eighths; i += T::producer_threads) {
        const u32 run = i / eighths, place = (i - run * eighths) * 8;
        const u32 block = ptx::load_shared(shared + T::run_tile + 4 * run) - 1;
        const u32 filled = filled_of_8(block * block_m + place);
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

}  // namespace gemm
