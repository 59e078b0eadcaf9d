// One kernel on the whole device: each CTA selects a row or a few, 8 warps a row; the winners cross in packets through L2
// (plan/row_packets.cuh), and then every CTA knows all counts and writes its own part of the plan.
#pragma once
#include "fused_router/rapid_select.cuh"
#include "fused_router/throughput.cuh"
#include "plan/row_packets.cuh"
#include "ptx/words.cuh"

namespace fused_router {

// CTAS: most CTAs of the grid. A CTA has GROUPS groups of 8 warps and at most 32 rows.
template <i32 E, i32 K, typename Logit, i32 BLOCK_M, i32 CTAS, i32 GROUPS>
struct Spread {
    using Selection = RapidSelect<E, K, Logit>;
    using State = typename Selection::State;
    static constexpr u32 WARPS = Selection::WARPS;  // of a group
    static constexpr u32 SELECTORS = Selection::SELECTORS;
    static constexpr i32 THREADS = GROUPS * WARPS * kWarp;
    using Packets = plan::RowPackets<E, K, CTAS>;
    static constexpr u32 kSelection = 1;  // barrier of all threads
    static constexpr u32 WEIGHTS_WARP = WARPS - 1;  // holds no experts
    static constexpr u32 PAIRS_WARP = 1;
    static constexpr u32 SENDING_WARP = 0;
    static_assert(THREADS >= E / 2, "a thread places two experts");

    struct Shared {
        typename Packets::Counts counts;
        ChunkPairs<E, K, 1> pairs;
        plan::Places<E> places;
        uint4 ids[GROUPS][K * 2 / 16];
        typename Selection::Scratch row[GROUPS];
    };

    static __device__ __forceinline__ void run(const Inputs<Logit>& in, const plan::Shape& shape, const plan::Tensors& out,
                                               u8* workspace, Shared& shared) {
        const u32 thread = threadIdx.x % (WARPS * kWarp);
        const Chunk chunk = chunk_of(blockIdx.x, gridDim.x, in.tokens);
        const u32 own = chunk.first + threadIdx.x / (WARPS * kWarp);
        typename Selection::Row loaded;
        if (thread < SELECTORS * kWarp && own < chunk.last) loaded = Selection::load(in.logits + static_cast<u64>(own) * E, in.bias, thread);
        Packets packets(workspace);
        const u32 warp = warp_index(), lane = threadIdx.x % kWarp;
        const u32 group = warp / WARPS, of_group = warp % WARPS;
        const u32 s = shared.row[0].address() + group * sizeof(typename Selection::Scratch);
        if (of_group == WEIGHTS_WARP) packets.prefetch(chunk.first, chunk.last, lane);
        if (of_group == 0) Selection::prepare(s, lane);
        if (warp == WEIGHTS_WARP && shape.expert_map != nullptr) ptx::touch<E>(shape.expert_map, lane);
        shared.counts.clear();
        shared.pairs.masks.clear();
        __syncthreads();
        packets.make_tag();
        if (threadIdx.x == 0) packets.keep();
        const u32 ids = ptx::shared_address(shared.ids[group]);
#pragma unroll 1
        for (u32 first = chunk.first; first < chunk.last; first += GROUPS) {
            const u32 row = first + group;
            State state;
            const auto* logits = in.logits + static_cast<u64>(row) * E;
            const typename Selection::Together all = {kSelection, shared.row[0].address(), chunk.last - first, row < chunk.last};
            select(logits, in.bias, loaded, s, all, of_group, lane, state);
            if (!all.here) break;
            if (of_group < SELECTORS && row + GROUPS < chunk.last) loaded = Selection::load(logits + GROUPS * E, in.bias, thread);
            if (of_group == SENDING_WARP) send(packets, shape, row, ids, lane, state.mine, s);
            if (of_group == PAIRS_WARP && state.mine.wins) shared.pairs.add(row - chunk.first, state.mine.slot, state.mine.id, shape);
            if (of_group == WEIGHTS_WARP) write_row(in, row, s, state.mine);
        }
        packets.template receive<THREADS>(in.tokens, chunk.first, shared.counts);
        __syncthreads();
        plan::TwoCounts total, before;
        Packets::read(shared.counts, total, before);
        const plan::Part part = plan::part_of(blockIdx.x, gridDim.x, shape.experts);
        plan::place_experts<BLOCK_M>(shared.places, total, before, part, shape, out);
        shared.pairs.scatter(chunk, shared.places.base, out.sorted_ids);
        plan::fill_blocks<BLOCK_M, 8>(shared.places, part, shape, out);
    }

private:
    static __device__ __forceinline__ void select(const Logit* logits, const f32* bias, const typename Selection::Row& loaded,
                                                  u32 s, const typename Selection::Together& all, u32 warp, u32 lane,
                                                  State& state) {
        if (all.here && warp < SELECTORS) Selection::bound(s, loaded, warp, lane, state);
        ptx::barrier_sync_aligned(all.barrier, THREADS);
        Selection::template pick<GROUPS>(s, all, logits, bias, warp, lane, true, state);
        if (all.here) Selection::compare(s, warp, lane, state);
        ptx::barrier_sync_aligned(all.barrier, THREADS);
        if (all.here) Selection::settle(s, lane, state);
    }

    // The list is empty again for the group's next row: nobody looks at its length any more.
    static __device__ __forceinline__ void send(const Packets& packets, const plan::Shape& shape, u32 row, u32 ids, u32 lane,
                                                const Settled& mine, u32 s) {
        u32 local = shape.experts;
        if (mine.wins) local = plan::local_expert(mine.id, shape);
        if (local >= shape.experts) local = Packets::nowhere(row, mine.slot);
        ptx::store_shared_u16_if(mine.wins, ids + mine.slot * 2, local);
        __syncwarp();
        packets.send(row, ids, lane);
        Selection::prepare(s, lane);
    }

    static __device__ __forceinline__ void write_row(const Inputs<Logit>& in, u32 row, u32 s, const Settled& mine) {
        const f32 weight = Selection::weight(s, mine, in.renormalize, in.factor);
        if (!mine.wins) return;
        const u64 at = static_cast<u64>(row) * K + mine.slot;
        in.ids[at] = static_cast<i32>(mine.id);
        in.weights[at] = weight;
    }
};

}  // namespace fused_router
