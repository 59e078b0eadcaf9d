// Row sources of the grouped operators: rows sorted by expert, and a slab of rows for each expert. A slot is a row of x and
// of the result.
#pragma once
#include "common/types.cuh"
#include "gemm/rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace gemm {

struct Range {
    u32 first, rows;
};

// The next kRuns experts as runs, each with the rows that the source says are its own. By all producer threads.
template <class T, u32 kRuns, class Source>
__device__ __forceinline__ Window load_expert_runs(const Source& source, u32 num_experts, u32 shared, u32 first) {
    constexpr u32 kThreads = T::producer_threads;
    const u32 thread = threadIdx.x - T::first_producer, runs = smaller(num_experts - first, kRuns);
#pragma unroll
    for (u32 j = 0; j < ceil_div(kRuns, kThreads); ++j) {
        const u32 run = j * kThreads + thread;
        if (run < runs) {
            const Range range = source.range(first + run);
            ptx::store_shared(shared + T::run_slot + 4 * run, range.first);
            ptx::store_shared(shared + T::run_rows + 4 * run, range.rows);
            ptx::store_shared(shared + T::run_expert + 4 * run, first + run);
        }
    }
    ptx::barrier_sync_aligned(kProducerBarrier, kThreads);
    return {runs, first + runs, first + runs == num_experts};
}

// Expert e owns the rows offsets[e] to offsets[e + 1] - 1; or, with m_indices, the segments of 128 rows whose first row
// says e, up to the last row that is anybody's. Rows beyond [0, num_rows) do not exist, whatever the offsets say.
struct ContiguousRows {
    const void* offsets;   // i32 or i64
    const i32* m_indices;  // null: by offsets
    u32 num_rows, num_experts;
    bool wide;  // offsets are i64

    static constexpr u32 block_m = 128;

    __device__ __forceinline__ u32 pair(u32 slot) const {
        if (slot >= num_rows) return kNoRow;  // experts that share rows may be more work than the schedule can count
        return m_indices == nullptr || static_cast<u32>(m_indices[slot]) < num_experts ? slot : kNoRow;
    }
    __device__ __forceinline__ u32 source_row(u32 pair) const { return pair; }

    template <class T>
    __device__ __forceinline__ Window load_window(u32 shared, u32 first) const {
        if (m_indices == nullptr) return load_expert_runs<T, T::window>(*this, num_experts, shared, first);
        return load_block_runs<T>(*this, shared, first);
    }

    __device__ __forceinline__ Range range(u32 expert) const {
        const u32 first = offset(expert), end = offset(expert + 1);
        return {first, end > first ? end - first : 0};
    }

    __device__ __forceinline__ i32 expert(u32 block) const { return block < blocks() ? m_indices[block * block_m] : -1; }
    __device__ __forceinline__ void ask_ahead(u32) const {}
    __device__ __forceinline__ u32 blocks() const { return ceil_div(num_rows, block_m); }
    __device__ __forceinline__ u32 filled_of_8(u32 slot) const {
        u32 filled = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) filled = pair(slot + i) != kNoRow ? i + 1 : filled;
        return filled;
    }

private:
    __device__ __forceinline__ u32 offset(u32 index) const {
        const i64 value = wide ? static_cast<const i64*>(offsets)[index] : static_cast<const i32*>(offsets)[index];
        return value < 0 ? 0 : value < num_rows ? static_cast<u32>(value) : num_rows;
    }
};

// Expert e owns the first counts[e] of the rows_each rows of its slab: no more than there are, whatever the count says.
struct MaskedRows {
    const i32* counts;
    u32 rows_each, num_experts;

    __device__ __forceinline__ u32 pair(u32 slot) const { return slot; }
    __device__ __forceinline__ u32 source_row(u32 pair) const { return pair; }

    template <class T>
    __device__ __forceinline__ Window load_window(u32 shared, u32 first) const {
        return load_expert_runs<T, T::window>(*this, num_experts, shared, first);
    }

    __device__ __forceinline__ Range range(u32 expert) const {
        const i32 count = counts[expert];
        return {expert * rows_each, count > 0 ? smaller(static_cast<u32>(count), rows_each) : 0};
    }
};

}  // namespace gemm
