// Top-k selection of one row by 4 warps in few instructions, for rows that share a multiprocessor.
//
// A lane holds E/128 experts.
//
// 1. bound   What is compared is the filter's value (warp_select.cuh), one special-function result an expert. A bound = the
//            largest of a warp's 32 experts at one place of a lane. All bounds to shared memory; barrier.
// 2. pick    The K-th largest bound is reached by K experts, so whoever lies more than the filter's error below it cannot win.
//            The others (896 experts of random rows: mean 23, in 99 % of rows at most 32) become candidates, each warp's in
//            a region of its own; barrier. If there are more than 64, one warp selects the K winners exactly and they are
//            the candidates.
// 3. rank    By any warp that needs to know: a lane computes one candidate's exact key and counts the keys above it.
// 4. settle  By the same warp: the winners' places in ascending order of id.
#pragma once
#include "common/types.cuh"
#include "fused_router/exact_select.cuh"
#include "fused_router/score.cuh"
#include "fused_router/warp_select.cuh"
#include "ptx/count.cuh"
#include "ptx/filter.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"
#include "ptx/words.cuh"

namespace fused_router {

template <i32 E_, i32 K_, typename Logit_>
struct LeanSelect {
    static constexpr i32 E = E_;
    static constexpr i32 K = K_;
    using Logit = Logit_;
    static constexpr u32 WARPS = 4;  // that hold experts
    static constexpr u32 ROW_THREADS = (WARPS + 1) * kWarp;  // with one that only ranks
    static constexpr i32 EACH = E / 128;  // experts of a lane
    static constexpr i32 BOUNDS = EACH * WARPS;
    static constexpr u32 CANDIDATES = 64;
    static constexpr u32 REGION = 32;  // candidates of a warp
    static constexpr u32 RANKERS = 2;  // warps that rank, each with memory of its own
    static constexpr bool kWide = sizeof(Logit) == 4;
    static constexpr i32 WORDS = kWide ? EACH : (EACH + 1) / 2;  // of a lane's logits
    static_assert(E % 128 == 0 && EACH < 8 && BOUNDS >= K && K <= 16 && K % 8 == 0, "experts must fit the lanes");

    // A lane's experts: 4 in a row, then 2, then 1, as many of these as there are bits in EACH.
    static constexpr i32 FOURS = EACH / 4;
    static constexpr i32 TWOS = EACH / 2 % 2;
    static constexpr i32 ONES = EACH % 2;
    static constexpr i32 TWO_AT = FOURS * 512;
    static constexpr i32 ONE_AT = TWO_AT + TWOS * 256;

    static __device__ __forceinline__ u32 expert(i32 c, u32 thread) {
        if (c < FOURS * 4) return thread * 4 + c;
        if (c < FOURS * 4 + TWOS * 2) return TWO_AT + thread * 2 + (c - FOURS * 4);
        return ONE_AT + thread;
    }

    // Shared memory of one row, by 32-bit address.
    struct Scratch {
        static constexpr u32 kBounds = 0;                               // a warp's keys, then nothing, in 4 or 8 places
        static constexpr u32 kCounts = kBounds + 32 * 4;                // candidates of each warp
        static constexpr u32 kList = kCounts + WARPS * 4;               // of each warp: logit, bias, id, unused
        static constexpr u32 kRank = kList + WARPS * REGION * 16;       // of each ranker:
        static constexpr u32 kRankKeys = 0;                             // keys
        static constexpr u32 kRankIds = kRankKeys + kWarp * 4;          // winners in any order; in rank_more with terms
        static constexpr u32 kRankTerms = kRankIds + 16 * 8;            // in ascending order of id
        static constexpr u32 kRankLocal = kRankTerms + 16 * 4;          // 16-bit local ids, in any order
        static constexpr u32 kRankBytes = kRankLocal + 16 * 2;
        static constexpr u32 kKeys = kRank + RANKERS * kRankBytes;      // E keys, of select_exact only
        static constexpr u32 kBytes = kKeys + E * 4;
        uint4 memory[kBytes / 16];
        static_assert(kKeys % 16 == 0 && kBytes % 16 == 0 && kRankBytes % 16 == 0, "scratch is laid out in 16-byte units");

        __device__ __forceinline__ u32 address() const {
            return ptx::shared_address(memory);
        }
    };

    struct Row {
        u32 logits[WORDS];
        u32 bias[EACH];
    };

    struct State {
        Row row;
        f32 value[EACH];
        uint4 counts;  // candidates of each warp
        Settled mine;
        u32 place;  // of the lane's winner among the winners, in any order
    };

    // `thread`: of the row's threads.
    static __device__ __forceinline__ Row load(const Logit* row, const f32* bias, u32 thread) {
        Row r;
        if constexpr (kWide) {
            load_words(r.logits, row, thread);
        } else {
            if constexpr (FOURS) {
                const uint2 v = ptx::load_readonly_v2(row + thread * 4);
                r.logits[0] = v.x;
                r.logits[1] = v.y;
            }
            if constexpr (TWOS) r.logits[FOURS * 2] = ptx::load_readonly(row + TWO_AT + thread * 2);
            if constexpr (ONES) r.logits[FOURS * 2 + TWOS] = ptx::load_readonly_u16(row + ONE_AT + thread);
        }
        load_words(r.bias, bias, thread);
        return r;
    }

    // Step 1, by the 4 warps, from state.row; the row's barrier follows.
    static __device__ __forceinline__ void bound(u32 s, u32 warp, u32 lane, State& state) {
        u32 top[STRIDE];
        const Row& row = state.row;
#pragma unroll
        for (i32 c = 0; c < EACH; ++c) {
            // 1/2 is added first, where it costs nothing on the way: the error's bound has room for that rounding.
            const f32 rank = fmaf(0.5f, ptx::tanh_approx(0.5f * logit(row, c)), __uint_as_float(row.bias[c]) + 0.5f);
            state.value[c] = fmaxf(rank, __uint_as_float(0xff800000u));  // a NaN becomes -inf
        }
#pragma unroll
        for (i32 c = 0; c < EACH; ++c) top[c] = ptx::warp_max(key_of_number(state.value[c]));
#pragma unroll
        for (i32 c = EACH; c < STRIDE; ++c) top[c] = 0;
#pragma unroll
        for (i32 c = 0; c < STRIDE; c += 4)
            ptx::store_shared_if(lane == 0, s + Scratch::kBounds + warp * STRIDE * 4 + c * 4,
                                 make_uint4(top[c], top[c + 1], top[c + 2], top[c + 3]));
    }

    // Step 2, by all 5 warps, after a barrier; ends with one.
    static __device__ __forceinline__ void pick(u32 s, u32 barrier, const Logit* row, const f32* bias, u32 warp, u32 lane,
                                                State& state) {
        if (warp < WARPS) list(s, kth_bound(s, lane), warp, lane, state);
        ptx::barrier_sync_aligned(barrier, ROW_THREADS);
        state.counts = ptx::load_shared_v4(s + Scratch::kCounts);
        const u32 most = max(max(state.counts.x, state.counts.y), max(state.counts.z, state.counts.w));
        // All lanes know the same; the vote tells the compiler.
        if (__all_sync(kFullWarp, total(state) - K <= CANDIDATES - K && most <= REGION)) return;
        ptx::barrier_sync_aligned(barrier, ROW_THREADS);  // the counts were read
        if (warp == 0) take_exactly(s, row, bias, lane);
        ptx::barrier_sync_aligned(barrier, ROW_THREADS);
        state.counts = make_uint4(K, 0, 0, 0);
    }

    // Step 3, by any warp that took part in step 2, each with a number below RANKERS: who wins, but not yet in which place.
    static __device__ __forceinline__ void rank(u32 s, u32 ranker, u32 lane, State& state) {
        const u32 at = s + Scratch::kRank + ranker * Scratch::kRankBytes;
        const u32 candidates = total(state);
        const uint4 own = candidate(s, lane, state);
        const bool here = lane < candidates;
        const f32 score = score_of(__uint_as_float(own.x));
        const u32 key = here ? key_of(rank_of(score, __uint_as_float(own.y))) : 0;
        ptx::store_shared(at + Scratch::kRankKeys + lane * 4, key);
        __syncwarp();
        f32 larger[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 i = 0; i < kWarp / 4; ++i) {
            const uint4 v = ptx::load_shared_v4(at + Scratch::kRankKeys + i * 16);
            ptx::count_if_less(larger[0], key, v.x);
            ptx::count_if_less(larger[1], key, v.y);
            ptx::count_if_less(larger[0], key, v.z);
            ptx::count_if_less(larger[1], key, v.w);
        }
        u32 above = static_cast<u32>(larger[0] + larger[1]);
        state.mine = {here && above < K, 0, own.z, __float_as_uint(weight_term(score, key))};
        u32 winners = __ballot_sync(kFullWarp, state.mine.wins);
        // All lanes know the same; the votes tell the compiler.
        if (__any_sync(kFullWarp, candidates > kWarp)) {
            rank_more(s, at, lane, candidates, key, above, state);
        } else {
            if (__any_sync(kFullWarp, __popc(winners) > K)) {
                above += equals_before(at, key, own.z);
                state.mine.wins = here && above < K;
                winners = __ballot_sync(kFullWarp, state.mine.wins);
            }
            state.place = __popc(winners & ptx::lanes_below());
        }
    }

    // Step 4, by the same warp: the places in ascending order of id.
    static __device__ __forceinline__ void settle(u32 s, u32 ranker, u32 lane, State& state) {
        const u32 at = s + Scratch::kRank + ranker * Scratch::kRankBytes + Scratch::kRankIds;
        __syncwarp();
        ptx::store_shared_if(state.mine.wins, at + state.place * 4, state.mine.id);
        __syncwarp();
        f32 lower[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 i = 0; i < K / 4; ++i) {
            const uint4 v = ptx::load_shared_v4(at + i * 16);
            ptx::count_if_less(lower[0], v.x, state.mine.id);
            ptx::count_if_less(lower[1], v.y, state.mine.id);
            ptx::count_if_less(lower[0], v.z, state.mine.id);
            ptx::count_if_less(lower[1], v.w, state.mine.id);
        }
        state.mine.slot = static_cast<u32>(lower[0] + lower[1]);
    }

    // The winners' weights, after settle(); each winning lane gets its own.
    static __device__ __forceinline__ f32 weight(u32 s, u32 ranker, const Settled& mine, i32 renormalize, f32 factor) {
        const u32 terms = s + Scratch::kRank + ranker * Scratch::kRankBytes + Scratch::kRankTerms;
        return weight_through<K>(terms, mine, renormalize, factor);
    }

    // Shared address of K 16-bit places for the winners' local ids, of a ranker.
    static __device__ __forceinline__ u32 locals(u32 s, u32 ranker) {
        return s + Scratch::kRank + ranker * Scratch::kRankBytes + Scratch::kRankLocal;
    }

private:
    static constexpr i32 STRIDE = EACH < 4 ? 4 : 8;  // places of a warp's bounds

    static __device__ __forceinline__ u32 total(const State& state) {
        return state.counts.x + state.counts.y + state.counts.z + state.counts.w;
    }

    static __device__ __forceinline__ void load_words(u32* to, const f32* from, u32 thread) {
        if constexpr (FOURS) {
            const uint4 v = ptx::load_readonly_v4(from + thread * 4);
            to[0] = v.x;
            to[1] = v.y;
            to[2] = v.z;
            to[3] = v.w;
        }
        if constexpr (TWOS) {
            const uint2 v = ptx::load_readonly_v2(from + TWO_AT + thread * 2);
            to[FOURS * 4] = v.x;
            to[FOURS * 4 + 1] = v.y;
        }
        if constexpr (ONES) to[EACH - 1] = ptx::load_readonly(from + ONE_AT + thread);
    }

    static __device__ __forceinline__ u32 logit_bits(const Row& row, i32 c) {
        if constexpr (kWide) return row.logits[c];
        return c % 2 == 0 ? row.logits[c / 2] << 16 : row.logits[c / 2] & 0xffff0000u;
    }

    static __device__ __forceinline__ f32 logit(const Row& row, i32 c) {
        return __uint_as_float(logit_bits(row, c));
    }

    static __device__ __forceinline__ u32 kth_bound(u32 s, u32 lane) {
        const u32 own = ptx::load_shared(s + Scratch::kBounds + lane * 4);
        f32 larger[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 i = 0; i < WARPS * STRIDE; i += 4) {
            const uint4 v = ptx::load_shared_v4(s + Scratch::kBounds + i * 4);
            ptx::count_if_less(larger[0], own, v.x);
            ptx::count_if_less(larger[1], own, v.y);
            ptx::count_if_less(larger[0], own, v.z);
            if (i % STRIDE + 3 < EACH) ptx::count_if_less(larger[1], own, v.w);
        }
        const bool bound = lane < WARPS * STRIDE && lane % STRIDE < EACH;
        return ptx::warp_min(bound && larger[0] + larger[1] < static_cast<f32>(K) ? own : 0xffffffffu);
    }

    static __device__ __forceinline__ void list(u32 s, u32 limit, u32 warp, u32 lane, const State& state) {
        const f32 least = number_of_key(limit);
        const f32 may = least - 2.02f * fmaf(fabsf(least), 2 * kFilterRounding, kFilterError);
        u32 count = 0;
#pragma unroll
        for (i32 c = 0; c < EACH; ++c) count += state.value[c] >= may;
        const LanePrefix prefix = prefix_of_small(count, ptx::lanes_below());
        u32 at = prefix.before;
#pragma unroll
        for (i32 c = 0; c < EACH; ++c) {
            const bool in = state.value[c] >= may;
            ptx::store_shared_if(in && at < REGION, s + Scratch::kList + (warp * REGION + at) * 16,
                                 make_uint4(logit_bits(state.row, c), state.row.bias[c], expert(c, warp * kWarp + lane), 0));
            at += in;
        }
        ptx::store_shared_if(lane == 0, s + Scratch::kCounts + warp * 4, prefix.total);
    }

    // Candidate i of all regions: logit, bias, id.
    static __device__ __forceinline__ uint4 candidate(u32 s, u32 i, const State& state) {
        const u32 one = state.counts.x, two = one + state.counts.y, three = two + state.counts.z;
        const u32 shift = i >= three ? 3 * REGION - three : i >= two ? 2 * REGION - two : i >= one ? REGION - one : 0;
        return ptx::load_shared_v4(s + Scratch::kList + (i + shift) % (WARPS * REGION) * 16);
    }

    // How many of the first 32 candidates have the same key as this lane's and a lower id. Rare.
    static __device__ __forceinline__ u32 equals_before(u32 at, u32 key, u32 id) {
        u32 before = 0;
        const u32 keys = at + Scratch::kRankKeys;
#pragma unroll 1
        for (u32 i = 0; i < kWarp; ++i) {
            const u32 other_id = __shfl_sync(kFullWarp, id, i);  // by all lanes, so before anything that only some of them see
            before += ptx::load_shared(keys + i * 4) == key && other_id < id;
        }
        return before;
    }

    // Step 3 where there are more candidates than lanes, usually one or two more. `key`: of the lane's candidate, `above`:
    // larger keys among the first 32. Afterwards lane i below K has a winner.
    static __device__ __forceinline__ void rank_more(u32 s, u32 at, u32 lane, u32 candidates, u32 key, u32 above,
                                                     State& state) {
        const uint4 more = candidate(s, kWarp + lane, state);
        const bool here = kWarp + lane < candidates;
        const f32 score = score_of(__uint_as_float(more.x));
        const u32 more_key = here ? key_of(rank_of(score, __uint_as_float(more.y))) : 0;
        const u32 more_id = here ? more.z : 0xffffffffu;
        const u32 id = state.mine.id;
        u32 more_above = K;
#pragma unroll 2
        for (u32 i = 0; i < candidates - kWarp; ++i) {
            const u32 other = __shfl_sync(kFullWarp, more_key, i), other_id = __shfl_sync(kFullWarp, more_id, i);
            const bool beats = other > key || (other == key && other_id < id);
            above += beats;
            const u32 beaten_by = __ballot_sync(kFullWarp, !beats);
            const u32 beaten_by_more = __ballot_sync(kFullWarp, more_key > other || (more_key == other && more_id < other_id));
            if (lane == i) more_above = __popc(beaten_by) + __popc(beaten_by_more);
        }
        const u32 below = ptx::lanes_below(), winners_at = at + Scratch::kRankIds;
        const u32 second = __ballot_sync(kFullWarp, more_above < K);
        u32 first = __ballot_sync(kFullWarp, above < K);
        if (__any_sync(kFullWarp, __popc(first) + __popc(second) > K)) {
            above += equals_before(at, key, id);
            first = __ballot_sync(kFullWarp, above < K);
        }
        ptx::store_shared_if(above < K, winners_at + __popc(first & below) * 8, id, state.mine.term);
        ptx::store_shared_if(more_above < K, winners_at + (__popc(first) + __popc(second & below)) * 8, more_id,
                             __float_as_uint(weight_term(score, more_key)));
        __syncwarp();
        const uint2 winner = ptx::load_shared_v2(winners_at + lane % K * 8);
        state.mine = {lane < K, 0, winner.x, winner.y};
        state.place = lane;
    }

    // Any row, by one warp: the winners become the candidates, in the first region.
    static __device__ __forceinline__ void take_exactly(u32 s, const Logit* row, const f32* bias, u32 lane) {
        select_exact<E, K>(s + Scratch::kKeys, row, bias, lane, [s, row, bias](bool wins, u32 place, u32 e, u32) {
            const u32 logit = __float_as_uint(load_logit(row + e));
            ptx::store_shared_if(wins, s + Scratch::kList + place * 16,
                                 make_uint4(logit, __float_as_uint(__ldg(bias + e)), e, 0));
        });
    }
};

}  // namespace fused_router
