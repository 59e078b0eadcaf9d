// One cluster of CLUSTER CTAs routes any number of rows up to ROWS; each CTA holds GROUPS groups of four warps, and a
// group takes one row at a time. Every winner list goes to all CTAs through distributed shared memory, so there is one
// exchange and no join of the grid. CLUSTER = 1 needs neither: its groups mark their winners directly.
//
// The other warps of a CTA rehearse (see select.cuh): helper i runs step i dry while the logits are on their way, then
// joins the plan's steps, for which every span of 32 experts has a warp.
#pragma once
#include "common/types.cuh"
#include "fused_router/plan.cuh"
#include "fused_router/select.cuh"
#include "ptx/memory.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

// The steps of a warp. A group's warps begin at kBound, helpers (live) at kExchange.
enum Step : i32 { kBound, kGather, kFinish, kWrite, kExchange, kCount, kPlace, kEmit, kSteps };

template <i32 E_, i32 K_, typename Logit_, i32 ROWS_, i32 BLOCK_M_, i32 GROUPS_, i32 CLUSTER_>
struct SmallConfig {
    static constexpr i32 E = E_;
    static constexpr i32 K = K_;
    using Logit = Logit_;
    static constexpr i32 ROWS = ROWS_;        // most rows
    static constexpr i32 BLOCK_M = BLOCK_M_;  // 0: known at run time
    static constexpr i32 GROUPS = GROUPS_;
    static constexpr i32 CLUSTER = CLUSTER_;
    static constexpr i32 WARPS = larger(GROUPS * kQuad + kSteps, E / kWarp);
    static constexpr i32 THREADS = WARPS * kWarp;
    static constexpr i32 STRIDE = GROUPS * CLUSTER;  // rows taken at a time
    using Selection = Select<E, K, Logit>;
    using RowPlan = Plan<E, K, ROWS, BLOCK_M, CLUSTER>;
    static_assert(THREADS <= 1024 && GROUPS + kSteps <= 15, "too many groups: warps or named barriers run out");
    static_assert(CLUSTER == 1 || CLUSTER * K * 2 / 16 <= kWarp, "one lane sends 16 bytes to one CTA");

    struct Shared {
        u64 arrived;  // mbarrier: all winners of all rows are here
        alignas(16) u16 winners[ROWS][K];
        typename Selection::Scratch row[GROUPS];
        typename Selection::Scratch rehearsal[4];
        typename RowPlan::Scratch plan;
        typename RowPlan::Scratch rehearsal_plan;
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
        const u32 quarter = warp % kQuad;
        const u32 group = warp / kQuad;
        const u32 helper = warp - C::GROUPS * kQuad;
        const u32 cta = kOneCta ? 0 : ptx::cluster_rank();
        const i32 bm = C::BLOCK_M > 0 ? C::BLOCK_M : a.block_m;
        const auto* logits = static_cast<const Logit*>(a.logits);
        const bool selects = warp < C::GROUPS * kQuad;
        u32 row = cta + C::CLUSTER * group;
        Row x = {};
        Row bias = {};
        typename Selection::State state;
        typename RowPlan::State span{1, 1, 0};
        if (selects && row < tokens) {
            x = Selection::load(logits + static_cast<u64>(row) * C::E, quarter);
            bias = Selection::load_bias(a.bias, quarter);
        }
        Scratch& scratch = selects ? s.row[group] : s.rehearsal[helper % 4];
        auto* plan = &s.plan;
        i32 step = kBound;
        u32 served = warp;  // span of experts
        u32 barrier = 1 + group;
        bool live = true;
        bool met = kOneCta;  // whether this warp has waited for the cluster
        prologue(s, a, tokens);
        if (selects) {
            if (row >= tokens) step = kExchange;
        } else if (helper < kSteps) {
            live = false;
            step = static_cast<i32>(helper);
            served = 0;
            barrier = 1 + C::GROUPS + helper;
            plan = &s.rehearsal_plan;
            make_up<Selection>(scratch, state);
            if (step >= kExchange) plan->rows[0][ptx::lane_id()] = 1;
            row = 0;
        } else {
            step = kExchange;
        }
        const u32 finisher = group % kQuad;  // spreads the groups' finishing warps over the schedulers
        const u32 quad_threads = live ? kQuad * kWarp : kWarp;
        u32 all = live ? C::THREADS : kWarp;
        u32 all_barrier = live ? 0 : barrier;
        // Every step exists once: live warps fall through from theirs, a rehearsal leaves after one and joins at kExchange.
        switch (step) {
            case kBound:
            next_row:
                Selection::bound(scratch, x, bias, quarter, state);
                if (C::ROWS > C::STRIDE && live && row + C::STRIDE < tokens)
                    x = Selection::load(logits + static_cast<u64>(row + C::STRIDE) * C::E, quarter);
                ptx::barrier_sync_aligned(barrier, quad_threads);
                if (!live) break;
                [[fallthrough]];
            case kGather:
                Selection::gather(scratch, quarter, state);
                ptx::barrier_sync_aligned(barrier, quad_threads);
                if (!live) break;
                [[fallthrough]];
            case kFinish:
                if (!live || quarter == finisher)
                    Selection::finish(scratch, logits + static_cast<u64>(row) * C::E, a.bias, state.floor_key != kNanKey);
                if (!live) break;
                if (quarter == finisher) {
                    if (!met) ptx::cluster_wait_acquire();
                    met = true;
                    publish(s, a, scratch, row);
                }
                [[fallthrough]];
            case kWrite:
                if (!live || quarter == finisher)
                    write_row(scratch, live, a.weights + static_cast<u64>(row) * C::K,
                              a.ids + static_cast<u64>(row) * C::K, a.renormalize, a.factor);
                if (!live) break;
                if (C::ROWS > C::STRIDE) {
                    row += C::STRIDE;
                    if (row < tokens) {
                        bias = Selection::load_bias(a.bias, quarter);  // from L1: cheaper than seven registers
                        goto next_row;
                    }
                }
                [[fallthrough]];
            case kExchange:
            join:
                if (live && !met) ptx::cluster_wait_acquire();
                exchange(s, a, tokens, *plan, live);
                ptx::barrier_sync_aligned(all_barrier, all);
                if (!live) break;
                [[fallthrough]];
            case kCount:
                if (served < RowPlan::SPANS) RowPlan::count(*plan, served, bm, span);
                ptx::barrier_sync_aligned(all_barrier, all);
                if (!live) break;
                [[fallthrough]];
            case kPlace:
                if (served < RowPlan::SPANS) {
                    const i32 blocks = RowPlan::place(*plan, served, bm, span);
                    if (live && cta == C::CLUSTER - 1 && threadIdx.x == 0) {
                        a.plan.expert_offsets[a.num_local_experts] = blocks * bm;
                        a.plan.num_tokens_post_padded[0] = blocks * bm;
                    }
                }
                ptx::barrier_sync_aligned(all_barrier, all);
                if (!live) break;
                [[fallthrough]];
            default:
                write_pairs(s, a, *plan, tokens, cta, live);
                if (served < RowPlan::SPANS && (!live || served % C::CLUSTER == cta))
                    RowPlan::write_experts(a.plan, served, bm, tokens * C::K, span, live, a.num_local_experts);
        }
        if (!live) {
            live = true;
            served = warp;
            plan = &s.plan;
            all = C::THREADS;
            all_barrier = 0;
            goto join;
        }
    }

private:
    // While the first loads fly: clear the plan, read the map, make the mbarrier known to the cluster.
    static __device__ __forceinline__ void prologue(Shared& s, const SmallArguments& a, u32 tokens) {
        if constexpr (!kOneCta) {
            if (threadIdx.x == 0) {
                const u32 bar = ptx::shared_address(&s.arrived);
                ptx::mbarrier_init(bar, 1);
                ptx::mbarrier_init_fence();
                ptx::mbarrier_arrive_expect(bar, tokens * C::K * 2);
            }
            __syncwarp();
            ptx::cluster_arrive_release();
        }
        RowPlan::clear(s.plan, threadIdx.x, C::THREADS);
        if (threadIdx.x < 32) {
            for (u32 g = 0; g < C::GROUPS; ++g) Selection::prepare(s.row[g], threadIdx.x);
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
    static __device__ __forceinline__ void publish(Shared& s, const SmallArguments& a, const Scratch& scratch, u32 row) {
        const u32 lane = ptx::lane_id();
        if constexpr (kOneCta) {
            if (lane < C::K) {
                const u32 id = scratch.ids[lane];
                s.winners[row][lane] = static_cast<u16>(id);
                RowPlan::mark(s.plan, row, local_expert(s, a, id));
            }
        } else {
            constexpr u32 PARTS = C::K * 2 / 16;
            if (lane < C::CLUSTER * PARTS) {
                const u32 part = lane % PARTS;
                const uint4 ids = reinterpret_cast<const uint4*>(scratch.ids)[part];
                const u32 to = ptx::map_shared(ptx::shared_address(&s.winners[row][part * 8]), lane / PARTS);
                ptx::store_async(to, ptx::map_shared(ptx::shared_address(&s.arrived), lane / PARTS), ids);
            }
        }
    }

    // After it, and a barrier, all winners of all rows are in this CTA and marked.
    static __device__ __forceinline__ void exchange(Shared& s, const SmallArguments& a, u32 tokens,
                                                    typename RowPlan::Scratch& plan, bool live) {
        if constexpr (!kOneCta) {
            if (live) ptx::mbarrier_wait_cluster(ptx::shared_address(&s.arrived), 0);
            const u32 pairs = live ? tokens * C::K : kWarp;
            const u32 first = live ? threadIdx.x : ptx::lane_id();
#pragma unroll 1
            for (u32 pair = first; pair < pairs; pair += C::THREADS) {
                const u32 id = (&s.winners[0][0])[pair];
                RowPlan::mark(plan, pair / C::K, local_expert(s, a, live ? id : pair));
            }
        }
    }

    static __device__ __forceinline__ void write_pairs(const Shared& s, const SmallArguments& a,
                                                       const typename RowPlan::Scratch& plan, u32 tokens, u32 cta,
                                                       bool live) {
        const u32 own = tokens > cta ? (tokens - cta + C::CLUSTER - 1) / C::CLUSTER * C::K : 0;  // pairs of this CTA's rows
        const u32 pairs = live ? own : kWarp;
        const u32 first = live ? threadIdx.x : ptx::lane_id();
#pragma unroll 1
        for (u32 i = first; i < pairs; i += C::THREADS) {
            const u32 row = live ? i / C::K * C::CLUSTER + cta : 0;
            const u32 expert = live ? local_expert(s, a, s.winners[row][i % C::K]) : i;
            if (expert >= C::E) continue;
            const i32 slot = RowPlan::slot_of(plan, row, expert);
            if (live) a.plan.sorted_token_ids[slot] = row * C::K + i % C::K;
        }
    }
};

}  // namespace fused_router
