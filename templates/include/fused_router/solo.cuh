// One row, one CTA of 8 warps: all compare, the selectors write the offsets and counts of the experts they hold, and the
// last warp, which holds none, writes weights and ids.
//
// With one row every winner has exactly one block, so slots are known before the logits arrive: slot j * block_m holds pair
// j, every other the sentinel K.
//
// On a cold chip a short kernel waits for its own instructions more than for anything else, so while the logits are on
// their way every warp runs through one step on made-up data (pass 0); each step exists once in the code.
#pragma once
#include "common/types.cuh"
#include "fused_router/few_rows.cuh"
#include "fused_router/rapid_select.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/words.cuh"

namespace fused_router {

struct SoloArguments {
    const void* logits;
    const f32* bias;
    f32* weights;
    i32* ids;
    PlanOutputs plan;
    const i32* expert_map;  // null: every expert is local
    i32 num_local_experts;
    i32 block_m;
    i32 renormalize;
    f32 factor;
};

template <i32 E, i32 K, typename Logit_, i32 BLOCK_M, Rehearsal REHEARSAL>
struct Solo {
    using Logit = Logit_;
    using Selection = RapidSelect<E, K, Logit>;
    using State = typename Selection::State;
    static constexpr u32 WARPS = Selection::WARPS;
    static constexpr u32 SELECTORS = Selection::SELECTORS;
    static constexpr u32 STEPS = 5;
    static constexpr u32 REHEARSERS = REHEARSAL == Rehearsal::kFurther ? STEPS : REHEARSAL == Rehearsal::kOwn ? WARPS : 1;
    static constexpr i32 THREADS = (WARPS + (REHEARSAL == Rehearsal::kFurther ? STEPS : 0)) * kWarp;
    static constexpr u32 kRow = 1;  // barrier of the row's warps

    struct Shared {
        typename Selection::Scratch row;
        typename Selection::Mock rehearsal[REHEARSERS];
    };

    static __device__ __forceinline__ void run(const SoloArguments& a, Shared& shared) {
        const auto* logits = static_cast<const Logit*>(a.logits);
        typename Selection::Row loaded;
        if (threadIdx.x < SELECTORS * kWarp) loaded = Selection::load(logits, a.bias, threadIdx.x);
        const u32 warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);  // tells the compiler that all lanes agree
        const u32 lane = threadIdx.x % kWarp;
        const bool member = warp < WARPS;
        const u32 row = shared.row.address();
        if (warp == 0) Selection::prepare(row, lane);
        if (a.expert_map == nullptr) {
            if (member) write_slots(a, threadIdx.x);
        } else if (warp == WARPS - 1) {
            ptx::touch<E>(a.expert_map, lane);
        }
        const bool rehearses = REHEARSAL == Rehearsal::kOwn || !member;
        State state;
        u32 s = ptx::shared_address(shared.rehearsal) + warp % REHEARSERS * sizeof(typename Selection::Mock);
        typename Selection::Row data = Selection::make_up(s, rehearses, lane, state);
        u32 first = rehearses ? warp % STEPS : 0;
        bool live = !rehearses;
        if (live) {
            data = loaded;
            s = row;
        }
#pragma unroll 1
        for (;;) {
            // All lanes agree; told so, the compiler leaves out what diverged lanes would need.
            step(a, s, logits, data, warp, lane, __shfl_sync(kFullWarp, first, 0), __any_sync(kFullWarp, live), state);
            if (live || !member) break;
            live = true;
            s = row;
            first = 0;
            data = loaded;
        }
    }

private:
    // All steps from `first` on, or, in a rehearsal, that step.
    static __device__ __forceinline__ void step(const SoloArguments& a, u32 s, const Logit* logits,
                                                const typename Selection::Row& data, u32 warp, u32 lane, u32 first, bool live,
                                                State& state) {
        const bool selects = warp < SELECTORS;
        switch (first) {
            case 0:
                if (!live || selects) Selection::bound(s, data, warp, lane, state);
                if (!live) break;
                ptx::barrier_sync_aligned(kRow, Selection::ROW_THREADS);
                [[fallthrough]];
            case 1:
                Selection::pick(s, {kRow}, logits, a.bias, warp, lane, live, state);
                if (!live) break;
                [[fallthrough]];
            case 2:
                Selection::compare(s, warp, lane, state);
                if (!live) break;
                ptx::barrier_sync_aligned(kRow, Selection::ROW_THREADS);
                [[fallthrough]];
            case 3:
                Selection::settle(s, lane, state);
                state.mine.wins = state.mine.wins && live;
                if (a.expert_map != nullptr && live) {
                    write_mapped(a, s, state.mine, warp, lane);
                } else if (!live || selects) {
                    write_experts(a, state.mine, warp, lane, live);
                }
                if (warp != WARPS - 1) break;
                [[fallthrough]];
            default: {
                const f32 weight = Selection::weight(s, state.mine, a.renormalize, a.factor);
                if (state.mine.wins) {
                    a.ids[state.mine.slot] = static_cast<i32>(state.mine.id);
                    if (a.expert_map == nullptr) a.plan.expert_ids[state.mine.slot] = static_cast<i32>(state.mine.id);
                    a.weights[state.mine.slot] = weight;
                }
            }
        }
    }

    static __device__ __forceinline__ i32 block_m(const SoloArguments& a) {
        return BLOCK_M > 0 ? BLOCK_M : a.block_m;
    }

    // K blocks, block j holding pair j in its first slot; and the totals.
    static __device__ __forceinline__ void write_slots(const SoloArguments& a, u32 thread) {
        const u32 quads = block_m(a) / 4;
        const u32 from = WARPS * kWarp - 1 - thread;  // the last warp waits longest
#pragma unroll 1
        for (u32 i = from; i < K * quads; i += WARPS * kWarp) {
            const i32 first = i % quads == 0 ? i / quads : K;
            reinterpret_cast<int4*>(a.plan.sorted_token_ids)[i] = make_int4(first, K, K, K);
        }
        if (from == 0) {
            a.plan.num_tokens_post_padded[0] = K * block_m(a);
            a.plan.expert_offsets[E] = K * block_m(a);
        }
    }

    // Offsets and counts of a selector's 128 experts.
    static __device__ __forceinline__ void write_experts(const SoloArguments& a, const Settled& mine, u32 warp, u32 lane,
                                                         bool live) {
        const u32 thread = warp * kWarp + lane;
        const i32 bm = block_m(a);
        const u32 at = (mine.wins ? mine.id : 0xffffu) - warp * 128;  // huge where the expert is below, 128 or more where above
        const u32 bit = 1u << (at % 32);
        u32 words[4];
#pragma unroll
        for (u32 w = 0; w < 4; ++w) words[w] = ptx::warp_or(at / 32 == w ? bit : 0u);
        i32 before = __popc(__ballot_sync(kFullWarp, static_cast<i32>(at) < 0));
        u32 word = words[0];
#pragma unroll
        for (u32 w = 1; w < 4; ++w) {
            if (lane / 8 >= w) {
                before += __popc(words[w - 1]);
                word = words[w];
            }
        }
        const u32 first = lane % 8 * 4;
        before += __popc(word & ((1u << first) - 1));
        const u32 own = word >> first;
        const int4 counts = make_int4(own & 1, own >> 1 & 1, own >> 2 & 1, own >> 3 & 1);
        int4 offsets;
        offsets.x = before * bm;
        offsets.y = offsets.x + counts.x * bm;
        offsets.z = offsets.y + counts.y * bm;
        offsets.w = offsets.z + counts.z * bm;
        if (live) {
            reinterpret_cast<int4*>(a.plan.expert_offsets)[thread] = offsets;
            reinterpret_cast<int4*>(a.plan.expert_counts)[thread] = counts;
            reinterpret_cast<int4*>(a.plan.expert_scatter_offsets)[thread] = counts;
        }
    }

    // With an expert map the plan is over the winners that are local, ordered by their local ids. By all 8 warps, each with
    // memory of its own where select_exact kept the keys.
    static __device__ __forceinline__ void write_mapped(const SoloArguments& a, u32 s, Settled mine, u32 warp, u32 lane) {
        const i32 bm = block_m(a);
        const u32 experts = a.num_local_experts;
        const u32 at = s + Selection::Scratch::kKeys + warp * K * 4;
        u32 local = kNotLocal;
        if (mine.wins) local = static_cast<u32>(__ldg(a.expert_map + mine.id));
        if (local >= experts) local = kNotLocal;
        u32 all[K];
        share(at, mine, local, all);
        bool again = false;  // a map that names a local expert twice must not lead to more blocks than there is room for
#pragma unroll
        for (u32 i = 0; i < K; ++i) again |= all[i] == local && i < mine.slot;
        if (again) local = kNotLocal;
        share(at, mine, local, all);
        const bool placed = mine.wins && local != kNotLocal;
        u32 blocks = 0;
        u32 block = 0;  // of this lane's winner
#pragma unroll
        for (u32 i = 0; i < K; ++i) {
            blocks += all[i] < experts;
            block += all[i] < local;
        }
#pragma unroll 1
        for (u32 e = warp * kWarp + lane; e <= experts; e += WARPS * kWarp) {
            u32 before = 0;
            u32 here = 0;
#pragma unroll
            for (u32 i = 0; i < K; ++i) {
                before += all[i] < e;
                here |= all[i] == e;
            }
            a.plan.expert_offsets[e] = before * bm;
            if (e == experts) break;
            a.plan.expert_counts[e] = here;
            a.plan.expert_scatter_offsets[e] = here;
        }
        if (warp != 0) return;
        if (lane == 0) a.plan.num_tokens_post_padded[0] = blocks * bm;
        if (placed) {
            a.plan.expert_ids[block] = static_cast<i32>(local);
            int4* const slots = reinterpret_cast<int4*>(a.plan.sorted_token_ids + block * bm);
            slots[0] = make_int4(static_cast<i32>(mine.slot), K, K, K);
#pragma unroll 1
            for (i32 i = 1; i < bm / 4; ++i) slots[i] = make_int4(K, K, K, K);
        }
    }

    // Every lane gets what the winners' lanes have, in the order of the winners' places.
    static __device__ __forceinline__ void share(u32 at, const Settled& mine, u32 own, u32 (&all)[K]) {
        __syncwarp();
        ptx::store_shared_if(mine.wins, at + mine.slot * 4, own);
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < K; i += 4) {
            const uint4 v = ptx::load_shared_v4(at + i * 4);
            all[i] = v.x;
            all[i + 1] = v.y;
            all[i + 2] = v.z;
            all[i + 3] = v.w;
        }
    }
};

}  // namespace fused_router
