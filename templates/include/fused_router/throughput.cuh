// The kernels of the throughput arms: wide (one cluster), chain (selection, then one cluster plans), large (selection, then
// clusters of 8 plan), mid (as large, in one cooperative kernel), general (any size, three kernels).
// A CTA owns a contiguous chunk of rows, so the order of CTAs is the order of tokens and the plan is stable by construction.
#pragma once
#include "fused_router/row_loop.cuh"
#include "plan/chunk_counts.cuh"
#include "plan/cluster_counts.cuh"
#include "plan/cluster_rows.cuh"
#include "plan/column_scan.cuh"
#include "plan/grid_join.cuh"
#include "plan/place.cuh"
#include "plan/row_masks.cuh"
#include "ptx/special.cuh"

namespace fused_router {

// The operator's arguments, as the kernels get them.
template <typename T>
struct Inputs {
    const T* logits;
    const f32* bias;
    f32* weights;
    i32* ids;
    u32 tokens;
    i32 renormalize;
    f32 factor;
};

// The warp's number, in a way that tells the compiler that all lanes agree.
__device__ __forceinline__ u32 warp_index() {
    return __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);
}

struct Chunk {
    u32 first;
    u32 last;
};

__device__ __forceinline__ Chunk chunk_of(u32 part, u32 parts, u32 rows) {
    const u32 each = ceil_div(rows, parts);
    return {smaller(part * each, rows), smaller((part + 1) * each, rows)};
}

// Local ids of a chunk's pairs, and which rows chose which expert.
template <int E, int K, int kPlanes>
struct ChunkPairs {
    static constexpr u32 kMaxPairs = kPlanes * 32 * K;
    static constexpr u32 kNowhere = 0xffff;
    plan::RowMasks<E, kPlanes> masks;
    u16 experts[kMaxPairs];

    __device__ __forceinline__ void add(u32 row, u32 route, u32 expert, const plan::Shape& shape) {
        const u32 local = plan::local_expert(expert, shape);
        const bool placed = local < shape.experts;
        experts[row * K + route] = static_cast<u16>(placed ? local : kNowhere);
        if (placed) masks.add(row, local);
    }

    // This thread's ids of a chunk that another kernel selected: all loads before the first use.
    struct Fetched {
        static constexpr u32 kDepth = ceil_div<u32>(kMaxPairs, 512);
        u32 id[kDepth];
    };

    static __device__ __forceinline__ Fetched fetch(const i32* ids, const Chunk& chunk) {
        const u32 pairs = (chunk.last - chunk.first) * K;
        const i32* at = ids + static_cast<u64>(chunk.first) * K + threadIdx.x;
        Fetched fetched;
#pragma unroll
        for (u32 i = 0; i < Fetched::kDepth; ++i) {
            fetched.id[i] = threadIdx.x + i * 512 < pairs ? ptx::load_l2(at + i * 512) : 0;
        }
        return fetched;
    }

    __device__ __forceinline__ void add(const Fetched& fetched, const Chunk& chunk, const plan::Shape& shape) {
        const u32 pairs = (chunk.last - chunk.first) * K;
#pragma unroll
        for (u32 i = 0; i < Fetched::kDepth; ++i) {
            const u32 pair = threadIdx.x + i * 512;
            if (pair < pairs) add(pair / K, pair % K, fetched.id[i], shape);
        }
    }

    __device__ __forceinline__ void scatter(const Chunk& chunk, const u32* base, i32* sorted_ids) const {
        const u32 pairs = (chunk.last - chunk.first) * K;
#pragma unroll 2
        for (u32 i = threadIdx.x; i < pairs; i += 512) {
            const u32 local = experts[i];
            if (local != kNowhere) sorted_ids[base[local] + masks.rank(i / K, local)] = static_cast<i32>(chunk.first * K + i);
        }
    }
};

// Writes a winner's id and weight; the lanes below K call.
template <int K, typename T>
__device__ __forceinline__ void store_winner(const Inputs<T>& in, u32 row, u32 lane, const Winner& winner) {
    const u64 at = static_cast<u64>(row) * K + lane;
    in.ids[at] = static_cast<i32>(winner.id);
    in.weights[at] = winner.weight;
}

// ---- one cluster plans ------------------------------------------------------------------------------------------------

template <int E, int K, int kCluster>
struct WideShared {
    static constexpr u32 kMaxRows = kCluster * 32;
    plan::ClusterRows<kCluster, E, K, kMaxRows> rows;
    ChunkPairs<E, K, 1> pairs;
    plan::Places<E> places;
    WarpScratch<K> scratch[16];
};

// One cluster does everything; a CTA has 16 warps and at most 32 rows.
template <int E, int K, typename T, int kBlockM, int kCluster, bool kQuick>
__device__ __forceinline__ void route_wide(const Inputs<T>& in, const plan::Shape& shape, const plan::Tensors& out) {
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<WideShared<E, K, kCluster>*>(memory);
    const u32 lane = threadIdx.x % kWarp, warp = warp_index(), rank = ptx::cluster_rank();
    const Chunk chunk = chunk_of(rank, kCluster, in.tokens);
    const u32 each = ceil_div<u32>(in.tokens, kCluster);
    const u32 scratch = shared.scratch[warp].address(), winners = scratch + WarpScratch<K>::kIds;
    RowLoop<E, K, T, kQuick> rows(in.logits, in.bias, chunk.first + warp, chunk.last, blockDim.x / kWarp, lane);
    shared.rows.open(in.tokens, each);
    shared.pairs.masks.clear();
    __syncthreads();
    shared.rows.wait_open();
    rows.run(in.renormalize, in.factor, scratch, lane, [&](u32 row, const Winner& winner) {
        if (shape.expert_map != nullptr) {  // the others get local ids
            const u32 local = plan::local_expert(winner.id, shape);
            __syncwarp();
            ptx::store_shared_u16_if(lane < K, winners + lane % K * 2, local < shape.experts ? local : 0xffffu);
            __syncwarp();
        }
        shared.rows.send_row(row, rank, winners, lane);
        if (lane < K) {
            shared.pairs.add(row - chunk.first, lane, winner.id, shape);
            store_winner<K>(in, row, lane, winner);
        }
    });
    plan::TwoCounts total, before;
    shared.rows.receive(in.tokens, each, rank, total, before);
    const plan::Part part = plan::part_of(rank, kCluster, shape.experts);
    plan::place_experts<kBlockM>(shared.places, total, before, part, shape, out);
    shared.pairs.scatter(chunk, shared.places.base, out.sorted_ids);
    plan::fill_blocks<kBlockM, 8>(shared.places, part, shape, out);
}

// First kernel of chain: a warp a row, nothing else.
template <int E, int K, typename T, int kWarps, bool kQuick>
__device__ __forceinline__ void select_rows(const Inputs<T>& in) {
    __shared__ WarpScratch<K> scratch[kWarps];
    const u32 lane = threadIdx.x % kWarp, warp = warp_index();
    RowLoop<E, K, T, kQuick> rows(in.logits, in.bias, blockIdx.x * kWarps + warp, in.tokens, gridDim.x * kWarps, lane);
    ptx::grid_launch_dependents();
    rows.run(in.renormalize, in.factor, scratch[warp].address(), lane, [&](u32 row, const Winner& winner) {
        if (lane < K) store_winner<K>(in, row, lane, winner);
    });
}

template <int E, int K, int kPlanes, int kCluster>
struct ChainShared {
    ChunkPairs<E, K, kPlanes> pairs;
    plan::ClusterCounts<kCluster, E, u8> counts;
    plan::Places<E> places;
};

// Second kernel of chain: one cluster; a CTA takes at most 32 * kPlanes rows.
template <int E, int K, int kBlockM, int kCluster, int kPlanes>
__device__ __forceinline__ void plan_rows(const i32* ids, u32 tokens, const plan::Shape& shape, const plan::Tensors& out) {
    static_assert(kPlanes * 32 < 256, "counts are sent as bytes");
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<ChainShared<E, K, kPlanes, kCluster>*>(memory);
    const u32 rank = ptx::cluster_rank(), expert = 2 * threadIdx.x;
    const Chunk chunk = chunk_of(rank, kCluster, tokens);
    shared.counts.open(E);
    shared.pairs.masks.clear();
    __syncthreads();
    shared.counts.wait_open();
    ptx::grid_dependency_wait();
    shared.pairs.add(shared.pairs.fetch(ids, chunk), chunk, shape);
    __syncthreads();
    if (expert < E) shared.counts.set(shared.pairs.masks.count(expert), shared.pairs.masks.count(expert + 1));
    __syncthreads();
    shared.counts.send(rank, E);
    plan::TwoCounts total, before;
    shared.counts.receive(rank, E, total, before);
    const plan::Part part = plan::part_of(rank, kCluster, shape.experts);
    plan::place_experts<kBlockM>(shared.places, total, before, part, shape, out);
    shared.pairs.scatter(chunk, shared.places.base, out.sorted_ids);
    plan::fill_blocks<kBlockM, 8>(shared.places, part, shape, out);
}

// ---- clusters of 8 plan ------------------------------------------------------------------------------------------------

// First kernel of large and general: a CTA selects its chunk and leaves the chunk's counts, in `Count`s, in its row of
// `matrix`.
template <int E, int K, typename T, int kWarps, bool kAhead, typename Count>
__device__ __forceinline__ void select_and_count(const Inputs<T>& in, const plan::Shape& shape, Count* matrix) {
    __shared__ WarpScratch<K> scratch[kWarps];
    __shared__ uint4 counts[E / 4];
    u32* const count_of = reinterpret_cast<u32*>(counts);
    const u32 lane = threadIdx.x % kWarp, warp = warp_index();
    const Chunk chunk = chunk_of(blockIdx.x, gridDim.x, in.tokens);
    RowLoop<E, K, T, false, kAhead> rows(in.logits, in.bias, chunk.first + warp, chunk.last, kWarps, lane);
    ptx::grid_launch_dependents();
    for (u32 i = threadIdx.x; i < E / 4; i += kWarps * 32) counts[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    rows.run(in.renormalize, in.factor, scratch[warp].address(), lane, [&](u32 row, const Winner& winner) {
        if (lane < K) {
            const u32 local = plan::local_expert(winner.id, shape);
            if (local < shape.experts) atomicAdd(count_of + local, 1u);
            store_winner<K>(in, row, lane, winner);
        }
    });
    __syncthreads();
    for (u32 i = threadIdx.x; i < E / 4; i += kWarps * 32) {
        const uint4 c = counts[i];
        if (sizeof(Count) == 1) {  // a chunk's rows fit a byte; only a map that names a local expert twice could exceed it
            reinterpret_cast<u32*>(matrix)[blockIdx.x * (E / 4) + i] =
                smaller(c.x, 255u) | smaller(c.y, 255u) << 8 | smaller(c.z, 255u) << 16 | smaller(c.w, 255u) << 24;
        } else {
            reinterpret_cast<uint4*>(matrix)[static_cast<u64>(blockIdx.x) * (E / 4) + i] = c;
        }
    }
}

template <int E, int K, int kPlanes>
struct MatrixPlan {
    static constexpr int kThreads = 512;
    ChunkPairs<E, K, kPlanes> pairs;
    plan::ChunkCounts<E, kThreads> counts;
    plan::Places<E> places;
};

template <int E, int K, int kPlanes>
struct MidShared {
    MatrixPlan<E, K, kPlanes> plan;
    WarpScratch<K> scratch[16];
};

// From a complete matrix to the plan. counts.open() has been called and a barrier has followed. `complete` adds the
// chunk's pairs if they are not there yet, while the matrix is on its way.
template <int kBlockM, int E, int K, int kPlanes, typename Complete>
__device__ __forceinline__ void plan_from_matrix(MatrixPlan<E, K, kPlanes>& shared, const u8* matrix, u32 chunks,
                                                 const Chunk& chunk, const plan::Shape& shape, const plan::Tensors& out,
                                                 Complete&& complete) {
    const u32 rank = ptx::cluster_rank();
    const auto words = shared.counts.fetch(matrix, chunks, rank);
    complete();
    shared.counts.send(words, chunks, rank, blockIdx.x - rank);
    plan::TwoCounts total, before;
    shared.counts.receive(total, before);
    const plan::Part part = plan::part_of(blockIdx.x, gridDim.x, shape.experts);
    plan::place_experts<kBlockM>(shared.places, total, before, part, shape, out);
    shared.pairs.scatter(chunk, shared.places.base, out.sorted_ids);
    plan::fill_blocks<kBlockM, 8>(shared.places, part, shape, out);
}

// Second kernel of large. kChunks is the first kernel's grid; this one's is the same, rounded up to clusters.
template <int E, int K, int kBlockM, int kPlanes, u32 kChunks>
__device__ __forceinline__ void plan_chunks(const i32* ids, u32 tokens, const u8* matrix, const plan::Shape& shape,
                                            const plan::Tensors& out) {
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<MatrixPlan<E, K, kPlanes>*>(memory);
    static_assert(kChunks <= decltype(shared.counts)::kMaxChunks, "a CTA sums its slice in one go");
    Chunk chunk = {0, 0};
    if (blockIdx.x < kChunks) chunk = chunk_of(blockIdx.x, kChunks, tokens);
    shared.counts.open();
    shared.pairs.masks.clear();
    __syncthreads();
    ptx::grid_dependency_wait();
    const auto fetched = shared.pairs.fetch(ids, chunk);
    plan_from_matrix<kBlockM>(shared, matrix, kChunks, chunk, shape, out, [&] { shared.pairs.add(fetched, chunk, shape); });
}

// The single kernel of mid: co-resident clusters of 8, one join. workspace: the join's word, then (from byte 128) the matrix.
template <int E, int K, typename T, int kBlockM, int kPlanes>
__device__ __forceinline__ void route_mid(const Inputs<T>& in, const plan::Shape& shape, const plan::Tensors& out,
                                          u8* workspace) {
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<MidShared<E, K, kPlanes>*>(memory);
    const u32 lane = threadIdx.x % kWarp, warp = warp_index();
    u8* const matrix = workspace + 128;
    const Chunk chunk = chunk_of(blockIdx.x, gridDim.x, in.tokens);
    if (chunk.last - chunk.first > kPlanes * 32) __trap();  // too small a device for so many tokens: stop, do not corrupt
    RowLoop<E, K, T> rows(in.logits, in.bias, chunk.first + warp, chunk.last, blockDim.x / kWarp, lane);
    shared.plan.counts.open();
    shared.plan.pairs.masks.clear();
    __syncthreads();
    rows.run(in.renormalize, in.factor, shared.scratch[warp].address(), lane, [&](u32 row, const Winner& winner) {
        if (lane < K) {
            shared.plan.pairs.add(row - chunk.first, lane, winner.id, shape);
            store_winner<K>(in, row, lane, winner);
        }
    });
    __syncthreads();
    if (threadIdx.x < E / 4) {
        const auto& masks = shared.plan.pairs.masks;
        const u32 e = threadIdx.x * 4;
        reinterpret_cast<u32*>(matrix)[blockIdx.x * (E / 4) + threadIdx.x] =
            masks.count(e) | masks.count(e + 1) << 8 | masks.count(e + 2) << 16 | masks.count(e + 3) << 24;
    }
    plan::join_grid(reinterpret_cast<u32*>(workspace));
    plan_from_matrix<kBlockM>(shared.plan, matrix, gridDim.x, chunk, shape, out, [] {});
}

// ---- any size ----------------------------------------------------------------------------------------------------------

// Second kernel of general. A chunk has at least kRows rows, and there are at most kMaxChunks.
template <int E, u32 kRows, u32 kMaxChunks>
__device__ __forceinline__ void sum_chunks(u32 tokens, u32* matrix, u32* totals) {
    ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    plan::scan_columns(matrix, totals, smaller(ceil_div(tokens, kRows), kMaxChunks), E);
}

template <int E, int K, int kPlanes>
struct PlaceShared {
    ChunkPairs<E, K, kPlanes> pairs;
    plan::Places<E> places;
};

// Third kernel of general: chunk sums and totals are ready; blocks and padding are shared out by experts.
template <int E, int K, int kBlockM, int kPlanes>
__device__ __forceinline__ void place_chunk(const i32* ids, u32 tokens, const u32* before_at, const u32* totals,
                                            const plan::Shape& shape, const plan::Tensors& out) {
    extern __shared__ uint4 memory[];
    auto& shared = *reinterpret_cast<PlaceShared<E, K, kPlanes>*>(memory);
    const Chunk chunk = chunk_of(blockIdx.x, gridDim.x, tokens);
    shared.pairs.masks.clear();
    __syncthreads();
    ptx::grid_dependency_wait();
    const auto fetched = shared.pairs.fetch(ids, chunk);
    plan::TwoCounts total = {0, 0}, before = {0, 0};
    const u32 expert = 2 * threadIdx.x;
    if (expert < E) {
        total = {ptx::load_l2(totals + expert), ptx::load_l2(totals + expert + 1)};
        const u32* own = before_at + static_cast<u64>(blockIdx.x) * E + expert;
        before = {ptx::load_l2(own), ptx::load_l2(own + 1)};
    }
    shared.pairs.add(fetched, chunk, shape);
    const plan::Part part = plan::part_of(blockIdx.x, gridDim.x, shape.experts);
    plan::place_experts<kBlockM>(shared.places, total, before, part, shape, out);
    shared.pairs.scatter(chunk, shared.places.base, out.sorted_ids);
    plan::fill_blocks<kBlockM, 32>(shared.places, part, shape, out);
}

}  // namespace fused_router
