// Sorted rows and slabs as a resident program's row sources: all experts fit its lists at once.
#pragma once
#include "common/types.cuh"
#include "gemm/resident_schedule.cuh"
#include "gemm/rows_grouped.cuh"

namespace gemm {

template <class T>
__device__ __forceinline__ Window find_runs(const MaskedRows& rows, u32 shared, u32 first) {
    return load_expert_runs<T, T::runs>(rows, rows.num_experts, shared, first);
}

// Segments of m_indices that are looked at together: one a thread, as more would not fit the producer's registers.
template <class T>
struct SegmentWindow : T {
    static constexpr u32 window = T::producer_threads;
    static_assert(window <= T::runs, "every segment may be a run of its own");
};

template <class T>
__device__ __forceinline__ Window find_runs(const ContiguousRows& rows, u32 shared, u32 first) {
    if (rows.m_indices == nullptr) return load_expert_runs<T, T::runs>(rows, rows.num_experts, shared, first);
    return load_block_runs<SegmentWindow<T>>(rows, shared, first);
}

}  // namespace gemm
