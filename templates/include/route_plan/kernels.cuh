// Plans from given ids: any number of pairs, ids that may repeat in a row or lie outside [0, experts), up to 1024 experts.
// A CTA owns a contiguous chunk of pairs and a warp a contiguous run of it, so CTA, warp and lane order is pair order.
#pragma once
#include "plan/cluster_counts.cuh"
#include "plan/column_scan.cuh"
#include "plan/pair_ranks.cuh"
#include "plan/place.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace route_plan {

constexpr int kMaxExperts = 1024;
constexpr u32 kThreads = 512;
constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kChunkStep = kThreads;  // chunks are multiples of 32 pairs a warp

// Pairs of the calling warp, [first, last), first a multiple of 32.
struct Run {
    u32 first;
    u32 last;
};

__device__ __forceinline__ Run run_of_warp(u32 part, u32 parts, u32 pairs) {
    const u32 chunk = round_up(ceil_div(pairs, parts), kChunkStep), each = chunk / kWarps;
    const u64 first = static_cast<u64>(part) * chunk + threadIdx.x / kWarp * each;
    const u64 last = first + each;
    return {first < pairs ? static_cast<u32>(first) : pairs, last < pairs ? static_cast<u32>(last) : pairs};
}

// Local expert of a pair, shape.experts or more if it has no place in the plan.
__device__ __forceinline__ u32 expert_of(const i32* ids, u32 pair, u32 experts, const plan::Shape& shape) {
    const u32 id = static_cast<u32>(__ldg(ids + pair));
    return id < experts ? plan::local_expert(id, shape) : 0xffffffffu;
}

using Ranks = plan::PairRanks<kMaxExperts, kWarps>;

__device__ __forceinline__ void count_run(Ranks& ranks, const Run& run, const i32* ids, u32 experts,
                                          const plan::Shape& shape) {
    for (u32 pair = run.first + threadIdx.x % kWarp; pair < run.last; pair += kWarp) {
        const u32 expert = expert_of(ids, pair, experts, shape);
        if (expert < shape.experts) ranks.add(expert);
    }
}

__device__ __forceinline__ void place_run(Ranks& ranks, const Run& run, const u32* base, const i32* ids, u32 experts,
                                          const plan::Shape& shape, i32* sorted_ids) {
    for (u32 start = run.first; start < run.last; start += kWarp) {
        const u32 pair = start + threadIdx.x % kWarp;
        const u32 expert = pair < run.last ? expert_of(ids, pair, experts, shape) : 0xffffffffu;
        const bool placed = expert < shape.experts;
        const u32 rank = ranks.take(expert, placed);
        if (placed) sorted_ids[base[expert] + rank] = static_cast<i32>(pair);
    }
}

// One cluster, or a single CTA, which needs no join; fewer than 2^16 pairs. kSegments: 32 pairs each that a warp keeps in
// registers, so at most kCluster * kThreads * kSegments pairs in all.
template <int kCluster>
struct SmallShared {
    Ranks ranks;
    plan::ClusterCounts<kCluster, kMaxExperts, u16> counts;
    plan::Places<kMaxExperts> places;
};

template <int kCluster, int kSegments>
__device__ __forceinline__ void plan_small(const i32* ids, u32 experts, const plan::Shape& shape, const plan::Tensors& out) {
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<SmallShared<kCluster>*>(memory);
    const u32 rank = kCluster == 1 ? 0 : ptx::cluster_rank();
    const Run run = run_of_warp(rank, kCluster, shape.pairs);
    const u32 own = run.first + threadIdx.x % kWarp;
    u32 expert[kSegments];  // first global, then local ids
#pragma unroll
    for (int i = 0; i < kSegments; ++i) expert[i] = own + i * kWarp < run.last ? __ldg(ids + own + i * kWarp) : 0xffffffffu;
    if (kCluster > 1) shared.counts.open(shape.experts);
    shared.ranks.clear();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
        if (expert[i] < experts) expert[i] = plan::local_expert(expert[i], shape);
        else expert[i] = 0xffffffffu;
        if (expert[i] < shape.experts) shared.ranks.add(expert[i]);
    }
    __syncthreads();
    plan::TwoCounts total = plan::unpack(shared.ranks.scan_warps()), before = {0, 0};
    if (kCluster > 1) {
        shared.counts.set(total.first, total.second);
        shared.counts.wait_open();
        __syncthreads();
        shared.counts.send(rank, shape.experts);
        shared.counts.receive(rank, shape.experts, total, before);
    }
    const plan::Part part = plan::part_of(rank, kCluster, shape.experts);
    plan::place_experts<0>(shared.places, total, before, part, shape, out);
#pragma unroll
    for (int i = 0; i < kSegments; ++i) {
        const bool placed = expert[i] < shape.experts;
        const u32 at = shared.ranks.take(expert[i], placed);
        if (placed) out.sorted_ids[shared.places.base[expert[i]] + at] = static_cast<i32>(own + i * kWarp);
    }
    plan::fill_blocks<0, 8>(shared.places, part, shape, out);
}

// Three kernels for any size: counts per chunk, sums over the chunks, places. A row of the matrix has round_up(experts, 32)
// elements; the totals come first in the workspace.
__device__ __forceinline__ u32 row_length(const plan::Shape& shape) {
    return round_up(shape.experts, plan::kScanExperts);
}

__device__ __forceinline__ void count_chunk(const i32* ids, u32 experts, const plan::Shape& shape, u32* matrix) {
    __shared__ u32 counts[kMaxExperts];
    ptx::grid_launch_dependents();
    for (u32 i = threadIdx.x; i < kMaxExperts; i += kThreads) counts[i] = 0;
    __syncthreads();
    const Run run = run_of_warp(blockIdx.x, gridDim.x, shape.pairs);
#pragma unroll 4
    for (u32 pair = run.first + threadIdx.x % kWarp; pair < run.last; pair += kWarp) {
        const u32 expert = expert_of(ids, pair, experts, shape);
        if (expert < shape.experts) atomicAdd(counts + expert, 1u);
    }
    __syncthreads();
    const u32 length = row_length(shape);
    for (u32 i = threadIdx.x; i < length; i += kThreads) matrix[static_cast<u64>(blockIdx.x) * length + i] = counts[i];
}

template <u32 kMinPairs, u32 kMaxChunks>
__device__ __forceinline__ void sum_chunks(const plan::Shape& shape, u32* matrix, u32* totals) {
    ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    const u32 length = row_length(shape);
    if (blockIdx.x * plan::kScanExperts >= length) return;
    plan::scan_columns(matrix, totals, smaller(larger(ceil_div(shape.pairs, kMinPairs), 1u), kMaxChunks), length);
}

struct LargeShared {
    Ranks ranks;
    plan::Places<kMaxExperts> places;
};

__device__ __forceinline__ void place_chunk(const i32* ids, u32 experts, const plan::Shape& shape, const u32* matrix,
                                            const u32* totals, const plan::Tensors& out) {
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<LargeShared*>(memory);
    const Run run = run_of_warp(blockIdx.x, gridDim.x, shape.pairs);
    shared.ranks.clear();
    __syncthreads();
    count_run(shared.ranks, run, ids, experts, shape);
    __syncthreads();
    shared.ranks.scan_warps();
    ptx::grid_dependency_wait();
    plan::TwoCounts total = {0, 0}, before = {0, 0};
    const u32 expert = 2 * threadIdx.x;
    if (expert < row_length(shape)) {
        const u32* own = matrix + static_cast<u64>(blockIdx.x) * row_length(shape) + expert;
        total = {ptx::load_l2(totals + expert), ptx::load_l2(totals + expert + 1)};
        before = {ptx::load_l2(own), ptx::load_l2(own + 1)};
    }
    const plan::Part part = plan::part_of(blockIdx.x, gridDim.x, shape.experts);
    plan::place_experts<0>(shared.places, total, before, part, shape, out);
    place_run(shared.ranks, run, shared.places.base, ids, experts, shape, out.sorted_ids);
    plan::fill_blocks<0, 32>(shared.places, part, shape, out);
}

}  // namespace route_plan
