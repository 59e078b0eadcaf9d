// Up to 16 rows in one cluster: each CTA selects one row with 8 warps. The selectors send their experts' words of the row to
// all CTAs, one store each; every CTA then has all rows' words and each of its warps builds the plan from them for itself.
//
// Steps, rehearsals: as in solo.cuh.
#pragma once
#include "common/types.cuh"
#include "fused_router/few_rows.cuh"
#include "fused_router/rapid_select.cuh"
#include "fused_router/row_words.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"
#include "ptx/words.cuh"

namespace fused_router {

template <i32 E, i32 K, typename Logit_, i32 BLOCK_M, i32 CLUSTER, Rehearsal REHEARSAL>
struct Few {
    using Logit = Logit_;
    using Selection = RapidSelect<E, K, Logit>;
    using State = typename Selection::State;
    static constexpr u32 SPANS = E / 32;
    using Plan = RowWords<SPANS, CLUSTER, BLOCK_M>;
    static constexpr u32 WARPS = Selection::WARPS;  // with the row
    static constexpr u32 SELECTORS = Selection::SELECTORS;
    static constexpr u32 STEPS = 8;
    static constexpr u32 kRow = 1;  // barrier of the row's warps
    static constexpr u32 REHEARSERS = REHEARSAL == Rehearsal::kFurther ? STEPS : REHEARSAL == Rehearsal::kOwn ? WARPS : 1;
    static constexpr i32 THREADS = (WARPS + (REHEARSAL == Rehearsal::kFurther ? STEPS : 0)) * kWarp;
    static constexpr u32 PLAN_STEP = 5;             // the first one of a warp without a row
    static constexpr u32 WEIGHTS_WARP = WARPS - 1;  // these two hold no experts, or few
    static constexpr u32 PAIRS_WARP = WARPS - 2;
    static_assert(CLUSTER > 1 && CLUSTER <= kWarp, "a lane sends to one CTA");

    struct Shared {
        u64 arrived;  // mbarrier: all rows' words are here
        u64 unused;
        uint4 words[CLUSTER][SELECTORS];
        typename Selection::Scratch row;
        typename Selection::Mock rehearsal[REHEARSERS];
    };

    // A warp's place and data.
    struct Here {
        u32 s;  // scratch of the row
        u32 warp;
        u32 lane;
        u32 cta;      // and row
        u32 words;    // shared address of all rows' words
        u32 arrived;  // of the mbarrier
        bool live;
        bool plans;  // whether the warp writes some of the plan, and so needs it
    };

    static __device__ __forceinline__ void run(const FewArguments& a, Shared& shared) {
        Here h;
        h.cta = ptx::cluster_rank();
        const auto* logits = static_cast<const Logit*>(a.logits) + static_cast<u64>(h.cta) * E;
        typename Selection::Row loaded;
        if (threadIdx.x < SELECTORS * kWarp && h.cta < a.num_tokens) loaded = Selection::load(logits, a.bias, threadIdx.x);
        const u32 warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);  // tells the compiler that all lanes agree
        const bool member = warp < WARPS;
        h.warp = warp % WARPS;
        h.lane = threadIdx.x % kWarp;
        h.words = ptx::shared_address(shared.words);
        h.arrived = ptx::shared_address(&shared.arrived);
        const u32 scratch = shared.row.address();
        if (a.expert_map != nullptr && warp == WEIGHTS_WARP) ptx::touch<E>(a.expert_map, h.lane);
        open(a, h);
        if (member && h.warp == 0) Selection::prepare(scratch, h.lane);
        State state;
        Plan plan{};
        u32 local = kNotLocal;
        h.s = ptx::shared_address(shared.rehearsal) + warp % REHEARSERS * sizeof(typename Selection::Mock);
        h.live = REHEARSAL != Rehearsal::kOwn && member;
        h.plans = needs_plan(a, h);
        typename Selection::Row data = Selection::make_up(h.s, !h.live, h.lane, state);
        const u32 first_live = h.cta >= a.num_tokens ? PLAN_STEP : 0;
        u32 first = h.live ? first_live : h.warp % STEPS;
        if (h.live) {
            meet();
            data = loaded;
            h.s = scratch;
        }
#pragma unroll 1
        for (;;) {
            step(a, h, logits, data, first, state, local, plan);
            if (h.live) break;
            meet();
            if (!member) break;
            h.live = true;
            h.s = scratch;
            first = first_live;
            data = loaded;
        }
    }

private:
    // The mbarrier, and the news to the cluster that it is there.
    static __device__ __forceinline__ void open(const FewArguments& a, const Here& h) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(h.arrived, 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        ptx::cluster_arrive_relaxed();  // the mbarrier's fence is all that it must order
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(h.arrived, a.num_tokens * SELECTORS * 16);
    }

    // Nothing is sent before all CTAs have opened. The wait is over long before the logits are here.
    static __device__ __forceinline__ void meet() {
        ptx::cluster_wait_acquire();
    }

    // All steps from `first` on that are this warp's, or, in a rehearsal, that step. `local`: the lane's winner by its local
    // id, or kNotLocal.
    static __device__ __forceinline__ void step(const FewArguments& a, const Here& h, const Logit* logits,
                                                const typename Selection::Row& data, u32 first, State& state, u32& local,
                                                Plan& plan) {
        const bool has_row = h.cta < a.num_tokens;
        const bool selects = h.warp < SELECTORS;
        switch (first) {
            case 0:
                if (!h.live || selects) Selection::bound(h.s, data, h.warp, h.lane, state);
                if (!h.live) break;
                ptx::barrier_sync_aligned(kRow, Selection::ROW_THREADS);
                [[fallthrough]];
            case 1:
                Selection::pick(h.s, {kRow}, logits, a.bias, h.warp, h.lane, h.live, state);
                if (!h.live) break;
                [[fallthrough]];
            case 2:
                Selection::compare(h.s, h.warp, h.lane, state);
                if (!h.live) break;
                ptx::barrier_sync_aligned(kRow, Selection::ROW_THREADS);
                [[fallthrough]];
            case 3:
                Selection::settle(h.s, h.lane, state);
                state.mine.wins = state.mine.wins && h.live;
                local = local_expert(a, state.mine);
                if (!h.live || selects) send_words(h, local);
                if (!h.live) break;
                [[fallthrough]];
            case 4:
                if (!h.live || h.warp == WEIGHTS_WARP) write_row(a, h, state.mine);
                if (!h.live) break;
                [[fallthrough]];
            case PLAN_STEP:
                if (h.live && !h.plans) break;
                if (h.live) ptx::mbarrier_wait_cluster(h.arrived, 0);
                plan.build(h.words, h.live ? a.num_tokens : 0, block_m(a), h.lane);
                if (!h.live) break;
                [[fallthrough]];
            case 6:
                if (!h.live || (has_row && h.warp == PAIRS_WARP)) write_pairs(a, h, plan, state.mine, local);
                if (!h.live) break;
                [[fallthrough]];
            default:
                write_experts(a, h, plan);
        }
    }

    static __device__ __forceinline__ i32 block_m(const FewArguments& a) {
        return BLOCK_M > 0 ? BLOCK_M : a.block_m;
    }

    // A selector's 4 words of the row, made from the lanes' winners, to all CTAs.
    static __device__ __forceinline__ void send_words(const Here& h, u32 local) {
        const u32 at = local - h.warp * 128;
        const u32 bit = 1u << (at % 32);
        u32 words[4];
#pragma unroll
        for (u32 w = 0; w < 4; ++w) words[w] = ptx::warp_or(at / 32 == w ? bit : 0u);
        if (!h.live) return;
        const uint4 four = make_uint4(words[0], words[1], words[2], words[3]);
        const u32 to = h.words + (h.cta * SELECTORS + h.warp) * 16;
        if (h.lane < CLUSTER) ptx::store_async(ptx::map_shared(to, h.lane), ptx::map_shared(h.arrived, h.lane), four);
    }

    // All rows' words are read by every warp that builds the plan, from one memory: the others keep away from it. The first
    // warp never does, so that no CTA leaves before all that is sent to it has come.
    static __device__ __forceinline__ bool needs_plan(const FewArguments& a, const Here& h) {
        const bool first = h.warp == 0;
        const bool writes_pairs = h.warp == PAIRS_WARP && h.cta < a.num_tokens;
        return first || writes_pairs || first_span(h) < SPANS || writes_totals(h);
    }

    static __device__ __forceinline__ u32 first_span(const Here& h) {
        return h.cta + CLUSTER * h.warp;
    }

    static __device__ __forceinline__ bool writes_totals(const Here& h) {
        return h.cta == CLUSTER - 1 && h.warp == WEIGHTS_WARP;
    }

    static __device__ __forceinline__ void write_row(const FewArguments& a, const Here& h, const Settled& mine) {
        write_winner<K>(a, h.cta, mine, Selection::weight(h.s, mine, a.renormalize, a.factor));
    }

    // The row's pairs, each expert's block ids by the pairs that begin its blocks, and its padding by its last pair.
    static __device__ __forceinline__ void write_pairs(const FewArguments& a, const Here& h, const Plan& plan,
                                                       const Settled& mine, u32 local) {
        const bool placed = mine.wins && local != kNotLocal;
        const u32 bm = block_m(a);
        const u32 expert = placed ? local : 0;
        const u32 rank = Plan::rank(h.words, h.live ? h.cta : 0, expert);
        const typename Plan::Expert e = plan.at(expert);
        const u32 slot = e.first_block * bm + rank;
        if (!placed) return;
        a.plan.sorted_token_ids[slot] = static_cast<i32>(h.cta * K + mine.slot);
        u32 block = 0;
#pragma unroll
        for (i32 i = 1; i < Plan::LEVELS; ++i) block += rank >= i * bm;
        if (rank == block * bm) a.plan.expert_ids[e.first_block + block] = static_cast<i32>(local);
        if (rank + 1 == e.count) pad<K, BLOCK_M>(a, slot + 1, (e.first_block + e.blocks) * bm);
    }

    // Counts and offsets of every CLUSTER-th span of 32 experts, shared among the CTA's warps; and the totals.
    static __device__ __forceinline__ void write_experts(const FewArguments& a, const Here& h, const Plan& plan) {
        const i32 bm = block_m(a);
#pragma unroll 1
        for (u32 span = first_span(h); span < SPANS; span += CLUSTER * WARPS) {
            const u32 expert = span * 32 + h.lane;
            const typename Plan::Expert e = plan.at(expert);
            if (h.live && expert < static_cast<u32>(a.num_local_experts)) {
                a.plan.expert_counts[expert] = e.count;
                a.plan.expert_scatter_offsets[expert] = e.count;
                a.plan.expert_offsets[expert] = e.first_block * bm;
            }
        }
        if (h.live && writes_totals(h) && h.lane == 0) {
            a.plan.expert_offsets[a.num_local_experts] = plan.total * bm;
            a.plan.num_tokens_post_padded[0] = plan.total * bm;
        }
    }
};

}  // namespace fused_router
