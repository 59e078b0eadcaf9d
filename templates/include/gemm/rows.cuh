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
};

// Finds the runs of the kWindow blocks from `first` on and writes them to the lists. By all producer threads.
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
    const u32 thread = threadIdx.x - T::math_threads, block_m = source.block_m, eighths = block_m / 8;
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

template <class T, class Source>
__device__ __forceinline__ Window load_block_runs(const Source& source, u32 shared, u32 first) {
    constexpr u32 kThreads = T::producer_threads, kEach = T::window / kThreads, kWarps = kThreads / 32;
    const u32 thread = threadIdx.x - T::math_threads, warp = thread / 32, lane = thread % 32;
    // Loads that do not wait for the number of blocks; the rows of the last blocks are asked for ahead of time too.
    i32 mine[kEach], before[kEach], after[kEach];
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
        const u32 block = first + j * kThreads + thread;
        mine[j] = source.expert(block);
        before[j] = block > first ? source.expert(block - 1) : -1;
        after[j] = source.expert(block + 1);
    }
    source.ask_ahead(first * source.block_m + thread * 32);
    const u32 blocks = source.blocks();
    const u32 end = smaller(first + T::window, blocks);

    u32 starts[kEach], stops[kEach];  // one bit a lane
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
        const u32 block = first + j * kThreads + thread;
        const bool valid = block < end && static_cast<u32>(mine[j]) < source.num_experts;
        starts[j] = __ballot_sync(kFullWarp, valid && (block == first || before[j] != mine[j]));
        stops[j] = __ballot_sync(kFullWarp, valid && (block + 1 == end || after[j] != mine[j]));
        if (lane == 0) {
            ptx::store_shared(shared + T::run_counts + 4 * (j * kWarps + warp), __popc(starts[j]) | __popc(stops[j]) << 16);
        }
    }
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
    u32 earlier[kEach] = {}, total = 0;  // starts in the lower half, stops in the upper
#pragma unroll
    for (u32 i = 0; i < kEach * kWarps; ++i) {
        const u32 count = ptx::load_shared(shared + T::run_counts + 4 * i);
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) earlier[j] += i < j * kWarps + warp ? count : 0;
        total += count;
    }
    // For now run_slot holds the first block of a run, run_tile the block after its last.
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
        const u32 block = first + j * kThreads + thread, below = ptx::lanes_below();
        if (starts[j] >> lane & 1) {
            const u32 run = (earlier[j] & 0xffff) + __popc(starts[j] & below);
            ptx::store_shared(shared + T::run_slot + 4 * run, block);
            ptx::store_shared(shared + T::run_expert + 4 * run, static_cast<u32>(mine[j]));
            ptx::store_shared(shared + T::run_rows + 4 * run, 0);
        }
        if (stops[j] >> lane & 1) {
            const u32 run = (earlier[j] >> 16) + __popc(stops[j] & below);
            ptx::store_shared(shared + T::run_tile + 4 * run, block + 1);
        }
    }
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
    u32 runs = total & 0xffff, next = end;
    if (runs > 0 && end < blocks && ptx::load_shared(shared + T::run_tile + 4 * (runs - 1)) == end) {
        const u32 start = ptx::load_shared(shared + T::run_slot + 4 * (runs - 1));
        const bool goes_on = static_cast<u32>(source.expert(end)) == ptx::load_shared(shared + T::run_expert + 4 * (runs - 1));
        if (goes_on && start > first) {
            --runs;
            next = start;
        }
    }
    fill_rows<T>(source, shared, runs);
    return {runs, next, next >= blocks};
}

}  // namespace gemm
