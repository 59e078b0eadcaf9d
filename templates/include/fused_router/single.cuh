// One row, one CTA: four warps select, E/128 helper warps write what the plan of one row looks like.
//
// With one row every winner has exactly one block, so all but the expert ids is known before the logits arrive:
// slot j * block_m holds pair j, everything else the sentinel K. The helpers store that, and zero the counts, while the
// loads fly; when the winners are known they store the offsets (a population count) and the K ones.
#pragma once
#include "common/types.cuh"
#include "fused_router/plan.cuh"
#include "fused_router/select.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

template <i32 E_, i32 K_, typename Logit_, i32 BLOCK_M_>
struct SingleConfig {
    static constexpr i32 E = E_;
    static constexpr i32 K = K_;
    using Logit = Logit_;
    static constexpr i32 BLOCK_M = BLOCK_M_;  // 0: known at run time
    static constexpr i32 HELPERS = larger(E / 128, kQuad);  // warps; a thread of the first E / 128 serves 4 experts
    static constexpr i32 THREADS = (kQuad + HELPERS) * kWarp;
    using Selection = Select<E, K, Logit>;

    struct Shared {
        typename Selection::Scratch row;
        typename Selection::Scratch rehearsal[kQuad];
    };
};

struct SingleArguments {
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

template <typename C>
struct Single {
    using Selection = typename C::Selection;
    using Shared = typename C::Shared;
    static constexpr i32 K = C::K;
    static constexpr u32 kSelected = 2;  // named barrier: the winners are in shared memory
    static constexpr u32 kSelectedThreads = (C::HELPERS + 1) * kWarp;

    static __device__ __forceinline__ void run(const SingleArguments& a, Shared& s) {
        const u32 warp = threadIdx.x / kWarp;
        if (warp < 2 * kQuad) select(a, s, warp);
        if (warp < kQuad) return;
        if (a.expert_map == nullptr) {
            help(a, s, warp - kQuad);
        } else {
            help_mapped(a, s, warp - kQuad);
        }
    }

private:
    // Warps 0 to 3 select, and warp 0 finishes; warp 4 + i rehearses step i.
    static __device__ __forceinline__ void select(const SingleArguments& a, Shared& s, u32 warp) {
        const auto* logits = static_cast<const typename C::Logit*>(a.logits);
        const u32 lane = threadIdx.x % kWarp;
        const bool live = warp < kQuad;
        const u32 q = warp % kQuad;
        typename Selection::Row x;
        typename Selection::Row bias;
        typename Selection::State state;
        if (live) {
            x = Selection::load(logits, q, lane);
            bias = Selection::load_bias(a.bias, q, lane);
        }
        const u32 row = live ? s.row.address() : s.rehearsal[q].address();
        const u32 first = live ? 0 : q;
        const u32 barrier = live ? 1 : 4 + q;
        const u32 threads = live ? kQuad * kWarp : kWarp;
        if (!live) {
            make_up<Selection>(row, lane, state);
        } else if (warp == 0) {
            Selection::prepare(row, lane);
        }
        Winner w{lane < K, lane % K, lane, 1.0f};
        switch (first) {  // every step exists once: live warps fall through, a rehearsal leaves after its step
            case 0:
                Selection::bound(row, x, bias, q, lane, state);
                ptx::barrier_sync_aligned(barrier, threads);
                if (!live) break;
                [[fallthrough]];
            case 1:
                Selection::pick(row, q, lane, state);
                ptx::barrier_sync_aligned(barrier, threads);
                if (!live || warp != 0) break;
                [[fallthrough]];
            case 2:
                w = Selection::finish(row, logits, a.bias, state.floor_key != kNanKey, lane);
                if (!live) break;
                ptx::barrier_arrive_aligned(kSelected, kSelectedThreads);
                [[fallthrough]];
            default:
                w.here = w.here && live;
                Selection::write(row, w, a.weights, a.ids, a.renormalize, a.factor);
                if (a.expert_map == nullptr && w.here) a.plan.expert_ids[w.slot] = static_cast<i32>(w.id);
        }
    }

    static __device__ __forceinline__ u32 winner(const Shared& s, u32 lane) {
        return lane < K ? ptx::load_shared_u16(s.row.address() + Selection::Scratch::kIds + lane % K * 2) : kNotLocal;
    }

    static __device__ __forceinline__ i32 block_m(const SingleArguments& a) {
        return C::BLOCK_M > 0 ? C::BLOCK_M : a.block_m;
    }

    // K blocks, block j holding pair j in its first slot, by all helper threads.
    static __device__ __forceinline__ void write_slots(const SingleArguments& a, u32 thread) {
        const u32 quads = block_m(a) / 4;
#pragma unroll 1
        for (u32 i = thread; i < K * quads; i += C::HELPERS * kWarp) {
            const i32 first = i % quads == 0 ? i / quads : K;
            reinterpret_cast<int4*>(a.plan.sorted_token_ids)[i] = make_int4(first, K, K, K);
        }
    }

    static __device__ __forceinline__ void help(const SingleArguments& a, Shared& s, u32 helper) {
        const u32 lane = ptx::lane_id();
        const u32 thread = helper * kWarp + lane;
        const i32 bm = block_m(a);
        const bool serves = helper < C::E / 128;
        if (serves) {
            reinterpret_cast<int4*>(a.plan.expert_counts)[thread] = make_int4(0, 0, 0, 0);
            reinterpret_cast<int4*>(a.plan.expert_scatter_offsets)[thread] = make_int4(0, 0, 0, 0);
        }
        write_slots(a, thread);
        if (thread == 0) {
            a.plan.num_tokens_post_padded[0] = K * bm;
            a.plan.expert_offsets[C::E] = K * bm;
        }
        // Once without winners, to have the instructions here; once in earnest.
#pragma unroll 1
        for (u32 pass = 0; pass < 2; ++pass) {
            u32 id = lane * 8;
            if (pass > 0) {
                ptx::barrier_sync_aligned(kSelected, kSelectedThreads);
                id = winner(s, lane);
            }
            write_offsets(a, id, helper, pass > 0 && serves);
        }
    }

    // Offsets of 128 experts from the winners, lane i < K having winner i, and the ones among their counts.
    static __device__ __forceinline__ void write_offsets(const SingleArguments& a, u32 id, u32 helper, bool live) {
        const u32 lane = ptx::lane_id();
        const u32 thread = helper * kWarp + lane;
        const i32 bm = block_m(a);
        const u32 at = id - helper * 128;  // huge where the expert is below, at least 128 where it is above
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
        const u32 mine = live ? word >> first : 0;
        int4 offsets;
        offsets.x = before * bm;
        offsets.y = offsets.x + (mine & 1 ? bm : 0);
        offsets.z = offsets.y + (mine & 2 ? bm : 0);
        offsets.w = offsets.z + (mine & 4 ? bm : 0);
        if (live) reinterpret_cast<int4*>(a.plan.expert_offsets)[thread] = offsets;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (mine >> i & 1) {
                a.plan.expert_counts[thread * 4 + i] = 1;
                a.plan.expert_scatter_offsets[thread * 4 + i] = 1;
            }
        }
    }

    // With an expert map the plan is over the winners that are local, ordered by their local ids.
    static __device__ __forceinline__ void help_mapped(const SingleArguments& a, Shared& s, u32 helper) {
        const u32 lane = ptx::lane_id();
        const u32 thread = helper * kWarp + lane;
        const i32 bm = block_m(a);
#pragma unroll 1
        for (i32 e = thread; e < a.num_local_experts; e += C::HELPERS * kWarp) {
            a.plan.expert_counts[e] = 0;
            a.plan.expert_scatter_offsets[e] = 0;
        }
        ptx::barrier_sync_aligned(kSelected, kSelectedThreads);
        u32 local = kNotLocal;
        if (lane < K) local = static_cast<u32>(__ldg(a.expert_map + winner(s, lane)));
        if (local >= static_cast<u32>(a.num_local_experts)) local = kNotLocal;
        if ((__match_any_sync(kFullWarp, local) & ptx::lanes_below()) != 0) local = kNotLocal;  // see plan/tensors.cuh
        const bool mine = local != kNotLocal;
        const i32 blocks = __popc(__ballot_sync(kFullWarp, mine));
        i32 block = 0;  // of this lane's winner
#pragma unroll
        for (i32 i = 0; i < K; ++i) block += __shfl_sync(kFullWarp, local, i) < local;
#pragma unroll 1
        for (i32 first = helper * kWarp; first <= a.num_local_experts; first += C::HELPERS * kWarp) {
            const u32 e = first + lane;
            i32 before = 0;
            i32 here = 0;
#pragma unroll
            for (i32 i = 0; i < K; ++i) {
                const u32 other = __shfl_sync(kFullWarp, local, i);
                before += other < e && other != kNotLocal;
                here |= other == e;
            }
            if (e <= a.num_local_experts) a.plan.expert_offsets[e] = before * bm;
            if (here && e < a.num_local_experts) {
                a.plan.expert_counts[e] = 1;
                a.plan.expert_scatter_offsets[e] = 1;
            }
        }
        if (helper != 0) return;
        if (lane == 0) a.plan.num_tokens_post_padded[0] = blocks * bm;
        if (mine) {
            a.plan.expert_ids[block] = static_cast<i32>(local);
            i32* slots = a.plan.sorted_token_ids + block * bm;
            slots[0] = lane;
#pragma unroll 1
            for (i32 i = 1; i < bm; ++i) slots[i] = K;
        }
    }
};

}  // namespace fused_router
