// One cluster of CLUSTER CTAs routes any number of rows up to ROWS; each CTA holds GROUPS groups of four warps, and a
// group takes one row at a time. Every winner list goes to all CTAs through distributed shared memory, so there is one
// exchange and no join of the grid. CLUSTER = 1 needs neither: its groups mark their winners directly.
//
// For the plan every span of 32 experts has a warp, so a CTA may have more warps than its groups need.
#pragma once
#include "common/types.cuh"
#include "fused_router/plan.cuh"
#include "fused_router/select.cuh"
#include "ptx/memory.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

template <i32 E_, i32 K_, typename Logit_, i32 ROWS_, i32 BLOCK_M_, i32 GROUPS_, i32 CLUSTER_>
struct SmallConfig {
    static constexpr i32 E = E_;
    static constexpr i32 K = K_;
    using Logit = Logit_;
    static constexpr i32 ROWS = ROWS_;        // most rows
    static constexpr i32 BLOCK_M = BLOCK_M_;  // 0: known at run time
    static constexpr i32 GROUPS = GROUPS_;
    static constexpr i32 CLUSTER = CLUSTER_;
    static constexpr i32 WARPS = larger(GROUPS * kQuad, E / kWarp);
    static constexpr i32 THREADS = WARPS * kWarp;
    static constexpr i32 STRIDE = GROUPS * CLUSTER;  // rows taken at a time
    using Selection = Select<E, K, Logit>;
    using RowPlan = Plan<E, K, ROWS, BLOCK_M, CLUSTER>;
    static_assert(THREADS <= 1024 && GROUPS <= 15, "too many groups: warps or named barriers run out");
    static_assert(CLUSTER == 1 || CLUSTER * K * 2 / 16 <= kWarp, "one lane sends 16 bytes to one CTA");

    struct Shared {
        u64 arrived;  // mbarrier: all winners of all rows are here
        alignas(16) u16 winners[ROWS][K];
        typename Selection::Scratch row[GROUPS];
        typename RowPlan::Scratch plan;
        u16 local[E];  // expert map, where there is one
    };
    static constexpr i32 SHARED_BYTES = sizeof(Shared);
};

struct SmallArguments {
    const void* logits;
    const f32* bias;
    f32* weights;
    i32* ids;
    PlanOutputs plan;
    const i32* expert_map;  // null: every expert is local
    i32 num_tokens;
    i32 num_local_experts;
    i32 block_m;
    i32 renormalize;
    f32 factor;
};

template <typename C>
struct Small {
    using Selection = typename C::Selection;
    using Scratch = typename Selection::Scratch;
    using RowPlan = typename C::RowPlan;
    using Row = typename Selection::Row;
    using Shared = typename C::Shared;
    using Logit = typename C::Logit;
    static constexpr bool kOneCta = C::CLUSTER == 1;

    static __device__ __forceinline__ void run(const SmallArguments& a, u32 tokens, u8* memory) {
        Shared& s = *reinterpret_cast<Shared*>(memory);
        const u32 warp = threadIdx.x / kWarp;
        const u32 cta = kOneCta ? 0 : ptx::cluster_rank();
        select(s, a, tokens, warp, cta);
        exchange(s, a, tokens);
        __syncthreads();
        const i32 bm = C::BLOCK_M > 0 ? C::BLOCK_M : a.block_m;
        typename RowPlan::State span;
        if (warp < RowPlan::SPANS) RowPlan::count(s.plan, warp, bm, span);
        __syncthreads();
        if (warp < RowPlan::SPANS) {
            const i32 blocks = RowPlan::place(s.plan, warp, bm, span);
            if (cta == C::CLUSTER - 1 && threadIdx.x == 0) {
                a.plan.expert_offsets[a.num_local_experts] = blocks * bm;
                a.plan.num_tokens_post_padded[0] = blocks * bm;
            }
        }
        __syncthreads();
        write_pairs(s, a, tokens, cta);
        if (warp < RowPlan::SPANS && warp % C::CLUSTER == cta)
            RowPlan::write_experts(a.plan, warp, bm, tokens * C::K, span, a.num_local_experts);
    }

private:
    static __device__ __forceinline__ void select(Shared& s, const SmallArguments& a, u32 tokens, u32 warp, u32 cta) {
        const auto* logits = static_cast<const Logit*>(a.logits);
        const u32 lane = threadIdx.x % kWarp;
        const u32 quarter = warp % kQuad;
        const u32 group = warp / kQuad;
        u32 row = cta + C::CLUSTER * group;
        if (group >= C::GROUPS) row = tokens;
        Row x;
        Row bias;
        if (row < tokens) {
            x = Selection::load(logits + static_cast<u64>(row) * C::E, quarter, lane);
            bias = Selection::load_bias(a.bias, quarter, lane);
        }
        prologue(s, a, tokens);
        bool met = kOneCta;  // whether this warp has waited for the cluster
        while (row < tokens) {
            const u32 scratch = s.row[group].address();
            typename Selection::State state;
            Selection::bound(scratch, x, bias, quarter, lane, state);
            ptx::barrier_sync_aligned(1 + group, kQuad * kWarp);
            Selection::pick(scratch, quarter, lane, state);
            ptx::barrier_sync_aligned(1 + group, kQuad * kWarp);
            if (quarter == group % kQuad) {  // spreads the groups' finishing warps over the schedulers
                const Winner w = Selection::finish(scratch, logits + static_cast<u64>(row) * C::E, a.bias,
                                                   state.floor_key != kNanKey, lane);
                if (!met) ptx::cluster_wait_acquire();
                met = true;
                publish(s, a, scratch, w, row, lane);
                Selection::write(scratch, w, a.weights + static_cast<u64>(row) * C::K,
                                 a.ids + static_cast<u64>(row) * C::K, a.renormalize, a.factor);
                if (C::ROWS > C::STRIDE) {
                    __syncwarp();
                    Selection::reset(scratch, lane);
                }
            }
            if (C::ROWS <= C::STRIDE) break;
            row += C::STRIDE;
            if (row < tokens) {
                x = Selection::load(logits + static_cast<u64>(row) * C::E, quarter, lane);
                bias = Selection::load_bias(a.bias, quarter, lane);
            }
        }
        if (!met) ptx::cluster_wait_acquire();
    }

    // While the first loads fly: clear the plan, read the map, make the mbarrier known to the cluster.
    static __device__ __forceinline__ void prologue(Shared& s, const SmallArguments& a, u32 tokens) {
        if constexpr (!kOneCta) {
            const u32 bar = ptx::shared_address(&s.arrived);
            if (threadIdx.x == 0) {
                ptx::mbarrier_init(bar, 1);
                ptx::mbarrier_init_fence();
            }
            __syncwarp();
            ptx::cluster_arrive_relaxed();  // the mbarrier's fence is all that it must order
            if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(bar, tokens * C::K * 2);
        }
        RowPlan::clear(s.plan, threadIdx.x, C::THREADS);
        if (threadIdx.x < C::GROUPS * kWarp) {
            Selection::prepare(s.row[threadIdx.x / kWarp].address(), threadIdx.x % kWarp);
        }
        if (a.expert_map != nullptr) {
#pragma unroll 1
            for (u32 e = threadIdx.x; e < C::E; e += C::THREADS) {
                const u32 local = static_cast<u32>(__ldg(a.expert_map + e));
                s.local[e] = static_cast<u16>(local < static_cast<u32>(a.num_local_experts) ? local : kNotLocal);
            }
        }
        __syncthreads();
    }

    static __device__ __forceinline__ u32 local_expert(const Shared& s, const SmallArguments& a, u32 id) {
        return a.expert_map != nullptr ? s.local[id] : id;
    }

    // The finishing warp makes its row's winners known to all CTAs.
    static __device__ __forceinline__ void publish(Shared& s, const SmallArguments& a, u32 scratch, const Winner& w, u32 row,
                                                   u32 lane) {
        if constexpr (kOneCta) {
            if (w.here) {
                s.winners[row][w.slot] = static_cast<u16>(w.id);
                RowPlan::mark(s.plan, row, local_expert(s, a, w.id));
            }
        } else {
            constexpr u32 PARTS = C::K * 2 / 16;
            if (lane < C::CLUSTER * PARTS) {
                const u32 part = lane % PARTS;
                const uint4 ids = ptx::load_shared_v4(scratch + Scratch::kIds + part * 16);
                const u32 to = ptx::map_shared(ptx::shared_address(&s.winners[row][part * 8]), lane / PARTS);
                ptx::store_async(to, ptx::map_shared(ptx::shared_address(&s.arrived), lane / PARTS), ids);
            }
        }
    }

    // After it, and a barrier, all winners of all rows are in this CTA and marked.
    static __device__ __forceinline__ void exchange(Shared& s, const SmallArguments& a, u32 tokens) {
        if constexpr (!kOneCta) {
            ptx::mbarrier_wait_cluster(ptx::shared_address(&s.arrived), 0);
#pragma unroll 1
            for (u32 pair = threadIdx.x; pair < tokens * C::K; pair += C::THREADS)
                RowPlan::mark(s.plan, pair / C::K, local_expert(s, a, (&s.winners[0][0])[pair]));
        }
    }

    static __device__ __forceinline__ void write_pairs(const Shared& s, const SmallArguments& a, u32 tokens, u32 cta) {
#pragma unroll 1
        for (u32 i = threadIdx.x;; i += C::THREADS) {
            const u32 row = i / C::K * C::CLUSTER + cta;
            if (row >= tokens) break;
            const u32 expert = local_expert(s, a, s.winners[row][i % C::K]);
            if (expert >= C::E) continue;
            a.plan.sorted_token_ids[RowPlan::slot_of(s.plan, row, expert)] = row * C::K + i % C::K;
        }
    }
};

}  // namespace fused_router
