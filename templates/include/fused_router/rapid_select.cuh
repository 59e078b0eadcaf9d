// Top-k selection of one row by 8 warps for least latency: a short chain of few, parallel steps, in little code.
//
// Warp w below E/128 (a selector) holds the experts [128 w, 128 w + 128), 4 in a row a lane: one load of 16 bytes.
//
// 1. bound   A bound = the largest key of a warp's 32 experts at one place of the 4. All bounds to shared memory; barrier.
// 2. pick    A limit a little below the mean of the bounds is guessed; experts that reach it become candidates (896 experts
//            of random rows: mean 24) in arbitrary order; barrier. The guess is good if there are K to 32 of them (97 % of
//            random rows). Otherwise the same code runs again with a limit nearby, then with one in the middle of what is
//            left between the bounds; and where ties leave none, one warp selects the K winners exactly and they are the
//            candidates.
// 3. compare Each warp ranks 4 candidates against all: a ballot of those before it, one of those with lower ids; barrier.
// 4. settle  Every warp then knows from one ballot who wins and in which place.
//
// Keys are integers that order as the rank values do, so ties and NaN need no care before the lower id decides.
#pragma once
#include "common/types.cuh"
#include "fused_router/exact_select.cuh"
#include "fused_router/score.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

// Who rehearses: nobody, the rows' own warps, or further warps, one a step.
enum class Rehearsal { kNone, kOwn, kFurther };

template <i32 E_, i32 K_, typename Logit_>
struct RapidSelect {
    static constexpr i32 E = E_;
    static constexpr i32 K = K_;
    using Logit = Logit_;
    using Raw = typename RawLogits4<Logit>::type;
    static constexpr i32 WARPS = 8;
    static constexpr i32 SELECTORS = E / 128;
    static constexpr i32 BOUNDS = 4 * SELECTORS;
    static constexpr u32 ROW_THREADS = WARPS * kWarp;
    static constexpr u32 CANDIDATES = 32;
    static constexpr i32 TARGETS = CANDIDATES / WARPS;  // candidates that a warp ranks
    static_assert(E % 128 == 0 && SELECTORS < WARPS && BOUNDS >= K && BOUNDS <= 32 && K <= 16, "experts must fit the warps");

    // Shared memory of one row, by 32-bit address.
    struct Scratch {
        static constexpr u32 kBounds = 0;                          // 32 keys
        static constexpr u32 kList = kBounds + 32 * 4;             // candidates: key, id, weight term, unused
        static constexpr u32 kMarks = kList + CANDIDATES * 16;     // of each: mask of candidates with lower ids, whether it wins
        static constexpr u32 kTerms = kMarks + CANDIDATES * 8;     // K weight terms, ascending id
        static constexpr u32 kTotals = kTerms + K * 4;             // 3 numbers of candidates, used in turn; may exceed the places
        static constexpr u32 kKeys = kTotals + 16;                 // E keys, of select_exact only
        static constexpr u32 kBytes = kKeys + E * 4;
        uint4 memory[kBytes / 16];
        static_assert(kKeys % 16 == 0 && kBytes % 16 == 0, "scratch is laid out in 16-byte units");

        __device__ __forceinline__ u32 address() const {
            return ptx::shared_address(memory);
        }
    };

    // The same for one warp's rehearsal, which never selects exactly.
    struct Mock {
        uint4 memory[Scratch::kKeys / 16];
    };

    struct Row {
        Raw logits;
        uint4 bias;
    };

    // What a warp carries from one step to the next.
    struct State {
        u32 key[4];
        f32 score[4];
        u32 total;  // candidates
        Settled mine;
    };

    // `thread`: of the row's threads.
    static __device__ __forceinline__ Row load(const Logit* row, const f32* bias, u32 thread) {
        const u32 at = thread * 4;
        return {load_raw4(row + at), ptx::load_readonly_v4(bias + at)};
    }

    // By one warp, before a barrier that comes before pick().
    static __device__ __forceinline__ void prepare(u32 s, u32 lane) {
        ptx::store_shared_if(lane < 4, s + Scratch::kTotals + lane % 4 * 4, 0u);
    }

    // Step 1, by the selectors; the row's barrier follows.
    static __device__ __forceinline__ void bound(u32 s, const Row& row, u32 warp, u32 lane, State& state) {
        const Logits4 x = as_logits(row.logits);
        const Logits4 b = as_logits(row.bias);
        u32 top[4];
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
            state.score[c] = score_of(x.x[c]);
            state.key[c] = key_of(rank_of(state.score[c], b.x[c]));
        }
#pragma unroll
        for (i32 c = 0; c < 4; ++c) top[c] = ptx::warp_max(state.key[c]);
        ptx::store_shared_if(lane == 0, s + Scratch::kBounds + warp * 16, make_uint4(top[0], top[1], top[2], top[3]));
    }

    // The rows that select together, each with 8 warps and a scratch of its own, one behind the other: when one of them has
    // to look for another limit, all do, so that all warps go through the same barriers.
    struct Together {
        u32 barrier;  // of the warps of all GROUPS
        u32 first;    // scratch of the first row
        u32 rows;     // that there are now
        bool here;    // whether these 8 warps have one of them
    };

    // Step 2, by all 8 warps, after a barrier; ends with one. In a rehearsal (not `live`) without.
    template <i32 GROUPS = 1>
    static __device__ __forceinline__ void pick(u32 s, const Together& all, const Logit* row, const f32* bias, u32 warp,
                                                u32 lane, bool live, State& state) {
        const bool idle = GROUPS > 1 && !all.here;
        Search search{idle ? 1 : guess(s, lane), 0, 0, false};
        u32 total_at = Scratch::kTotals;
#pragma unroll 1
        for (u32 turn = 0;; ++turn) {
            if (idle) {
                // only goes along
            } else if (search.ended) {
                if (warp == 0) take_exactly(s, total_at, row, bias, lane);
            } else if (!live || warp < SELECTORS) {
                list(s, total_at, search.limit, warp, lane, state);
            }
            if (!live) return;
            ptx::barrier_sync_aligned(all.barrier, GROUPS * ROW_THREADS);
            state.total = ptx::load_shared(s + total_at);
            bool right = GROUPS > 1 || is_right(state.total);
#pragma unroll
            for (u32 g = 0; GROUPS > 1 && g < GROUPS; ++g)
                right = right && (g >= all.rows || is_right(ptx::load_shared(all.first + g * sizeof(Scratch) + total_at)));
            // All lanes know the same; the vote tells the compiler.
            if (__all_sync(kFullWarp, right)) return;
            if (!idle && __any_sync(kFullWarp, !is_right(state.total))) narrow(search, s, state.total, turn, lane);
            // The number of the turn before is read by nobody any more, and of use again after the next barrier.
            const u32 before = total_at == Scratch::kTotals ? total_at + 8 : total_at - 4;
            ptx::store_shared_if(warp == 0 && lane == 0, s + before, 0u);
            total_at = total_at == Scratch::kTotals + 8 ? Scratch::kTotals : total_at + 4;
        }
    }

    // Step 3, by all 8 warps; the row's barrier follows.
    static __device__ __forceinline__ void compare(u32 s, u32 warp, u32 lane, State& state) {
        const u32 total = state.total;
        const uint4 own = ptx::load_shared_v4(s + Scratch::kList + lane * 16);
        uint2 target[TARGETS];
#pragma unroll
        for (i32 t = 0; t < TARGETS; ++t) target[t] = ptx::load_shared_v2(s + Scratch::kList + (warp * TARGETS + t) * 16);
        const bool here = lane < total;
        u32 lower[TARGETS];
        u32 wins[TARGETS];
#pragma unroll
        for (i32 t = 0; t < TARGETS; ++t) {
            const bool lower_id = own.y < target[t].y;
            const bool before = own.x > target[t].x || (own.x == target[t].x && lower_id);
            const u32 above = __ballot_sync(kFullWarp, here && before);
            lower[t] = __ballot_sync(kFullWarp, here && lower_id);
            wins[t] = __popc(above) < K && warp * TARGETS + t < total;
        }
#pragma unroll
        for (i32 t = 0; t < TARGETS; t += 2)
            ptx::store_shared_if(lane == 0, s + Scratch::kMarks + (warp * TARGETS + t) * 8,
                                 make_uint4(lower[t], wins[t], lower[t + 1], wins[t + 1]));
        state.mine = {false, 0, own.y, own.z};
    }

    // Step 4, by any warp that took part in step 3.
    static __device__ __forceinline__ void settle(u32 s, u32 lane, State& state) {
        const uint2 marks = ptx::load_shared_v2(s + Scratch::kMarks + lane * 8);
        state.mine.wins = marks.y != 0;
        state.mine.slot = __popc(__ballot_sync(kFullWarp, state.mine.wins) & marks.x);
    }

    // The winners' weights, by one warp after settle(); each winning lane gets its own.
    static __device__ __forceinline__ f32 weight(u32 s, const Settled& mine, i32 renormalize, f32 factor) {
        return weight_through<K>(s + Scratch::kTerms, mine, renormalize, factor);
    }

    // Made-up data on which every step takes its usual path, for rehearsals; `writes`: in `s` too, a mock.
    static __device__ __forceinline__ Row make_up(u32 s, bool writes, u32 lane, State& state) {
        ptx::store_shared_if(writes && lane < K, s + Scratch::kTerms + lane % K * 4, __float_as_uint(1.0f));
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
            state.key[c] = lane;
            state.score[c] = 1.0f;
        }
        state.total = K;
        state.mine = {false, 0, lane, __float_as_uint(1.0f)};
        Row row;
        row.logits = Raw();
        row.bias = make_uint4(0, 0, 0, 0);
        return row;
    }

private:
    // How far below the bounds' mean the guess is, in 32nds of the mean's distance to the lowest bound.
    static constexpr u32 kBelowMean = BOUNDS >= 24 ? 3 : 12;

    // Whether this many candidates can be ranked as they are.
    static __device__ __forceinline__ bool is_right(u32 total) {
        return total - K <= CANDIDATES - K;
    }

    // K or more keys reach `least`, fewer reach `most`; both are known from the second turn on.
    struct Search {
        u32 limit;
        u32 least;
        u32 most;
        bool ended;  // no limit is left
    };

    // Another limit after `total` keys reached the last one: first one nearby, then the middle.
    static __device__ __forceinline__ void narrow(Search& search, u32 s, u32 total, u32 turn, u32 lane) {
        if (turn == 0) {
            const u32 own = ptx::load_shared(s + Scratch::kBounds + lane * 4);
            search.least = ptx::warp_min(lane < BOUNDS ? own : 0xffffffffu);
            search.most = ptx::warp_max(lane < BOUNDS ? own : 0u) + 1;
        }
        const u32 step = (search.limit - search.least) / 8;
        const bool few = total < K;
        const u32 nearby = few ? search.limit - step : search.limit + step;
        (few ? search.most : search.least) = search.limit;
        const u32 middle = search.least + (search.most - search.least) / 2;
        const bool inside = nearby > search.least && nearby < search.most;
        search.limit = turn == 0 && inside ? nearby : middle;
        search.ended = __all_sync(kFullWarp, search.most - search.least <= 1);
    }

    static __device__ __forceinline__ u32 guess(u32 s, u32 lane) {
        const u32 own = ptx::load_shared(s + Scratch::kBounds + lane * 4);
        const bool bound = lane < BOUNDS;
        const u32 sum = ptx::warp_sum(bound ? own >> 5 : 0);  // 32 keys >> 5 cannot overflow
        const u32 low = ptx::warp_min(bound ? own : 0xffffffffu);
        constexpr u32 kPerBound = static_cast<u32>((1ull << 35) / BOUNDS);
        const u32 mean = max(__umulhi(sum, kPerBound) << 2, low);
        return max(mean - (mean - low) / 32 * kBelowMean, 1u);  // never NaN's key
    }

    static __device__ __forceinline__ void list(u32 s, u32 total_at, u32 limit, u32 warp, u32 lane, const State& state) {
        bool in[4];
        u32 count = 0;
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
            in[c] = state.key[c] >= limit;
            count += in[c];
        }
        u32 at = CANDIDATES;
        if (count != 0) at = ptx::shared_fetch_add(s + total_at, count);
        __syncwarp();
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
            ptx::store_shared_if(in[c] && at < CANDIDATES, s + Scratch::kList + at * 16,
                                 make_uint4(state.key[c], (warp * kWarp + lane) * 4 + c, __float_as_uint(state.score[c]), 0));
            at += in[c];
        }
    }

    // Any row, by one warp: the winners become the candidates.
    static __device__ __forceinline__ void take_exactly(u32 s, u32 total_at, const Logit* row, const f32* bias, u32 lane) {
        select_exact<E, K>(s + Scratch::kKeys, row, bias, lane, [s, row](bool wins, u32 place, u32 e, u32 key) {
            const f32 term = weight_term(score_of(load_logit(row + e)), key);
            ptx::store_shared_if(wins, s + Scratch::kList + place * 16, make_uint4(key, e, __float_as_uint(term), 0));
        });
        ptx::store_shared_if(lane == 0, s + total_at, static_cast<u32>(K));
        __syncwarp();
    }
};

}  // namespace fused_router
