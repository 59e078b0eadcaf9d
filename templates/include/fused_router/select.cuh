// Top-k selection of one row by four warps, for least latency: one exchange of bounds, one of candidates.
//
// Warp q of the four owns the experts [E/4*q, E/4*(q+1)), ITEMS = E/128 of them per lane, 32 apart.
//
// 1. Bound of a group = the largest rank value of 32 consecutive experts. All bounds go to shared memory; barrier.
// 2. Floor = the largest bound that at least K bounds reach. They are K different experts, so no winner is below it.
// 3. Candidates = experts at or above the floor (896 experts of random rows: mean 23, over 32 in 1 % of rows). A warp
//    takes places in one dense list with a shared atomic: their order is arbitrary and nothing depends on it. Barrier.
// 4. The finishing warp ranks up to 32 (or 64) candidates against each other; more (ties, NaN rows) take select_exact.
//
// Ranks are counted in the FMA pipe: saturate((a - b) * 2^96) is 1 if a > b and 0 if a <= b; it lies between, or is 0
// after a NaN, only for values that differ by less than 2^-96 or are not finite. So a count is never too large: a floor is
// never too high, and the set of candidates with count < K contains all winners. Only if it has more than K members (ties
// at the boundary, or such values) are they ordered again by integer keys.
#pragma once
#include "common/types.cuh"
#include "fused_router/score.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

constexpr i32 kQuad = 4;                                 // warps that share a row
constexpr f32 kStep = 79228162514264337593543950336.0f;  // 2^96
constexpr f32 kLowest = -3.402823466e38f;                // ranks below every candidate
constexpr i32 kCandidates = 64;                          // places of the list
constexpr u32 kNoExpert = 0xffffu;                       // in a place without a candidate

// Shared memory of one row in flight, reached by its 32-bit address.
template <i32 E, i32 K>
struct RowScratch {
    static constexpr u32 kBounds = 0;                                 // 32 floats
    static constexpr u32 kList = kBounds + 32 * 4;                    // candidates: rank value and id
    static constexpr u32 kScores = kList + kCandidates * 8;           // their scores
    static constexpr u32 kTerms = kScores + kCandidates * 4;          // K floats: the winners' weight terms, ascending id
    static constexpr u32 kIds = kTerms + K * 4;                       // K x 2 bytes: their experts
    static constexpr u32 kTotal = kIds + K * 2;                       // number of candidates; may exceed the places
    static constexpr u32 kKeys = round_up<u32>(kTotal + 4, 16);       // E keys, of select_exact only
    static constexpr u32 kBytes = round_up<u32>(kKeys + E * 4, 16);
    uint4 memory[kBytes / 16];

    __device__ __forceinline__ u32 address() const {
        return ptx::shared_address(memory);
    }
};

// A winner that a lane of the finishing warp holds, if any.
struct Winner {
    bool here;
    u32 slot;  // position in ascending id order
    u32 id;
    f32 term;
};

template <i32 E_, i32 K_, typename Logit_>
struct Select {
    static constexpr i32 E = E_;
    static constexpr i32 K = K_;
    using Logit = Logit_;
    using Scratch = RowScratch<E, K>;
    static constexpr i32 ITEMS = E / (kQuad * kWarp);
    static constexpr i32 SLOTS = round_up(ITEMS, 4);  // bounds of a warp, padded to whole 16-byte words
    static_assert(E % (kQuad * kWarp) == 0 && SLOTS * kQuad <= 32, "experts must fill four warps, with at most 32 bounds");
    static_assert(kQuad * ITEMS >= K && K <= 32 && K % 8 == 0, "there must be at least K bounds");

    struct Row {
        f32 x[ITEMS];
    };

    static __device__ __forceinline__ Row load(const Logit* row, u32 q, u32 lane) {
        Row v;
        const Logit* at = row + q * (ITEMS * kWarp) + lane;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) v.x[j] = load_logit(at + j * kWarp);
        return v;
    }

    static __device__ __forceinline__ Row load_bias(const f32* bias, u32 q, u32 lane) {
        Row v;
        const f32* at = bias + q * (ITEMS * kWarp) + lane;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) v.x[j] = __ldg(at + j * kWarp);
        return v;
    }

    // Once per scratch, before the first row, by warp 0 of the four. Bounds that no warp publishes are NaN, which is never
    // counted.
    static __device__ __forceinline__ void prepare(u32 s, u32 lane) {
        ptx::store_shared_if(lane >= kQuad * SLOTS, s + Scratch::kBounds + lane * 4, 0x7fffffffu);
        reset(s, lane);
    }

    // After a row, by the finishing warp: an empty list, with pads that rank below everything.
    static __device__ __forceinline__ void reset(u32 s, u32 lane) {
        ptx::store_shared_if(true, s + Scratch::kList + lane * 16,
                             make_uint4(__float_as_uint(kLowest), kNoExpert, __float_as_uint(kLowest), kNoExpert));
        ptx::store_shared_if(lane == 0, s + Scratch::kTotal, 0u);
    }

    // What a warp carries from one step to the next.
    struct State {
        f32 score[ITEMS];
        f32 rank[ITEMS];
        u32 floor_key;  // kNanKey: there is no floor, only select_exact can help
    };

    // Step 1, by all four warps; a barrier of the four follows.
    static __device__ __forceinline__ void bound(u32 s, const Row& x, const Row& bias, u32 q, u32 lane, State& state) {
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            state.score[j] = score_of(x.x[j]);
            state.rank[j] = rank_of(state.score[j], bias.x[j]);
        }
        publish_bounds(s, state.rank, q, lane);
    }

    // Steps 2 and 3, by all four warps; a barrier of the four follows.
    static __device__ __forceinline__ void pick(u32 s, u32 q, u32 lane, State& state) {
        state.floor_key = find_floor(s, lane);
        if (state.floor_key != kNanKey) list(s, state.rank, state.score, value_of(state.floor_key), q, lane);
    }

    // Step 4, by the finishing warp. The winners are in s.ids and s.terms, and each in one lane.
    static __device__ __forceinline__ Winner finish(u32 s, const Logit* row, const f32* bias, bool has_floor, u32 lane) {
        const u32 total = ptx::load_shared(s + Scratch::kTotal);
        if (has_floor && total <= 32) return rank_candidates<1>(s, total, lane);
        if (has_floor && total <= kCandidates) {
            rank_many(s, total, lane);
        } else {
            select_exact(s, row, bias, lane);
        }
        const u32 slot = lane % K;
        return {lane < K, slot, ptx::load_shared_u16(s + Scratch::kIds + slot * 2),
                __uint_as_float(ptx::load_shared(s + Scratch::kTerms + slot * 4))};
    }

    // Writes the row's weights and ids, by the finishing warp.
    static __device__ __forceinline__ void write(u32 s, const Winner& w, f32* weights, i32* ids, i32 renormalize,
                                                 f32 factor) {
        f32 all[K];
#pragma unroll
        for (i32 i = 0; i < K; i += 4) {
            const uint4 v = ptx::load_shared_v4(s + Scratch::kTerms + i * 4);
            all[i] = __uint_as_float(v.x);
            all[i + 1] = __uint_as_float(v.y);
            all[i + 2] = __uint_as_float(v.z);
            all[i + 3] = __uint_as_float(v.w);
        }
        if (w.here) ids[w.slot] = static_cast<i32>(w.id);
        const f32 weight = weight_of(w.term, sum_terms<K>(all), renormalize, factor);
        if (w.here) weights[w.slot] = weight;
    }

private:
    // Inverse of key_of.
    static __device__ __forceinline__ f32 value_of(u32 key) {
        return __uint_as_float((key & 0x80000000u) ? key ^ 0x80000000u : ~key);
    }

    // Floats compare like signed integers unless both are negative; then the integer maximum is the float minimum. Any
    // member of a group is a valid bound, so this only decides how good the bound is; a positive NaN becomes a NaN bound,
    // which counts for nothing.
    static __device__ __forceinline__ void publish_bounds(u32 s, const f32 (&rank)[ITEMS], u32 q, u32 lane) {
        i32 top[SLOTS];
        i32 all = 0;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            top[j] = ptx::warp_max(__float_as_int(rank[j]));
            all |= top[j];
        }
#pragma unroll
        for (i32 j = ITEMS; j < SLOTS; ++j) top[j] = 0x7fffffff;
        if (all < 0) {
#pragma unroll
            for (i32 j = 0; j < ITEMS; ++j) {
                const i32 lowest = ptx::warp_min(__float_as_int(rank[j]));
                if (top[j] < 0) top[j] = lowest;
            }
        }
#pragma unroll
        for (i32 j = 0; j < SLOTS; j += 4)
            ptx::store_shared_if(lane == 0, s + Scratch::kBounds + (q * SLOTS + j) * 4,
                                 make_uint4(top[j], top[j + 1], top[j + 2], top[j + 3]));
    }

    // Key of the largest bound above which at least K - 1 others lie, or kNanKey if there is none.
    static __device__ __forceinline__ u32 find_floor(u32 s, u32 lane) {
        const f32 own = __uint_as_float(ptx::load_shared(s + Scratch::kBounds + lane * 4));
        const f32 minus_own = -own * kStep;
        f32 above[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (i32 i = 0; i < kQuad * SLOTS; i += 4) {
            const uint4 b = ptx::load_shared_v4(s + Scratch::kBounds + i * 4);
            const u32 other[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (i32 j = 0; j < 4; ++j)
                if ((i + j) % SLOTS < ITEMS) above[j] += ptx::fma_saturate(__uint_as_float(other[j]), kStep, minus_own);
        }
        const f32 count = (above[0] + above[1]) + (above[2] + above[3]);
        // Below -2^31 `minus_own` may overflow to +inf, which would count everything.
        return ptx::warp_max(count >= K - 1 && own > -2147483648.0f ? key_of(own) : kNanKey);
    }

    static __device__ __forceinline__ void list(u32 s, const f32 (&rank)[ITEMS], const f32 (&score)[ITEMS], f32 floor,
                                                u32 q, u32 lane) {
        static_assert(ITEMS < 8, "a lane's count has three bits");
        u32 count = 0;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) count += rank[j] >= floor;
        // Places before this lane's: its warp's by ballots over the counts' bits, then one atomic by the last lane.
        const u32 below = (1u << lane) - 1;
        const u32 b0 = __ballot_sync(kFullWarp, count & 1);
        const u32 b1 = __ballot_sync(kFullWarp, count & 2);
        const u32 b2 = __ballot_sync(kFullWarp, count & 4);
        u32 at = __popc(b0 & below) + 2 * __popc(b1 & below) + 4 * __popc(b2 & below);
        u32 base = 0;
        if (lane == kWarp - 1) base = ptx::shared_fetch_add(s + Scratch::kTotal, at + count);
        at += __shfl_sync(kFullWarp, base, kWarp - 1);
        const u32 expert = q * (ITEMS * kWarp) + lane;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            const bool in = rank[j] >= floor && at < kCandidates;
            ptx::store_shared_if(in, s + Scratch::kList + at * 8, __float_as_uint(rank[j]), expert + j * kWarp);
            ptx::store_shared_if(in, s + Scratch::kScores + at * 4, __float_as_uint(score[j]));
            at += in;
        }
    }

    struct Candidate {
        f32 rank;
        u32 id;
    };

    // Candidates i and (S = 2) i + 32 belong to lane i.
    template <i32 S>
    static __device__ __forceinline__ Winner rank_candidates(u32 s, u32 total, u32 lane) {
        Candidate c[S];
        f32 score[S];
        f32 minus_own[S];
        f32 above[S][4];
        u32 lower[S][S];  // candidates with lower ids, as masks of lanes
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            const uint2 own = ptx::load_shared_v2(s + Scratch::kList + (lane + 32 * h) * 8);
            c[h] = {__uint_as_float(own.x), own.y};
            score[h] = __uint_as_float(ptx::load_shared(s + Scratch::kScores + (lane + 32 * h) * 4));
            minus_own[h] = -c[h].rank * kStep;
#pragma unroll
            for (i32 a = 0; a < 4; ++a) above[h][a] = 0.0f;
#pragma unroll
            for (i32 g = 0; g < S; ++g) lower[h][g] = 0;
        }
#pragma unroll
        for (i32 i = 0; i < 32 * S; i += 8) {
            if (i < K || i < total) {
#pragma unroll
                for (i32 j = 0; j < 8; j += 2) {
                    const uint4 two = ptx::load_shared_v4(s + Scratch::kList + (i + j) * 8);
                    const Candidate other[2] = {{__uint_as_float(two.x), two.y}, {__uint_as_float(two.z), two.w}};
#pragma unroll
                    for (i32 k = 0; k < 2; ++k) {
#pragma unroll
                        for (i32 h = 0; h < S; ++h) {
                            above[h][(j + k) % 4] += ptx::fma_saturate(other[k].rank, kStep, minus_own[h]);
                            if (other[k].id < c[h].id) lower[h][i / 32] |= 1u << ((i + j + k) % 32);
                        }
                    }
                }
            }
        }
        bool wins[S];
        u32 mask[S];
        u32 winners = 0;
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            const f32 count = (above[h][0] + above[h][1]) + (above[h][2] + above[h][3]);
            wins[h] = count < K - 0.5f && lane + 32 * h < total;
            mask[h] = __ballot_sync(kFullWarp, wins[h]);
            winners += __popc(mask[h]);
        }
        if (winners != K) settle<S>(s, c, wins, mask, total, lane);
        Winner w{false, 0, 0, 0.0f};
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            u32 slot = 0;
#pragma unroll
            for (i32 g = 0; g < S; ++g) slot += __popc(mask[g] & lower[h][g]);
            ptx::store_shared_if(wins[h], s + Scratch::kTerms + slot * 4, __float_as_uint(score[h]));
            ptx::store_shared_u16_if(wins[h], s + Scratch::kIds + slot * 2, c[h].id);
            if (wins[h]) w = {true, slot, c[h].id, score[h]};
        }
        __syncwarp();
        return w;
    }

    // Out of line: it is rare, and its code would only spread the common path.
    static __device__ __noinline__ void rank_many(u32 s, u32 total, u32 lane) {
        rank_candidates<2>(s, total, lane);
    }

    // More than K candidates seem to win: order them by key, then id. Rare.
    template <i32 S>
    static __device__ __forceinline__ void settle(u32 s, const Candidate (&c)[S], bool (&wins)[S], u32 (&mask)[S],
                                                  u32 total, u32 lane) {
        u64 own[S];
        i32 above[S];
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            own[h] = order_of(key_of(c[h].rank), c[h].id);
            above[h] = 0;
        }
#pragma unroll 1
        for (u32 i = 0; i < total; ++i) {
            const uint2 raw = ptx::load_shared_v2(s + Scratch::kList + i * 8);
            const u64 other = order_of(key_of(__uint_as_float(raw.x)), raw.y);
#pragma unroll
            for (i32 h = 0; h < S; ++h) above[h] += other > own[h];
        }
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            wins[h] = above[h] < K && lane + 32 * h < total;
            mask[h] = __ballot_sync(kFullWarp, wins[h]);
        }
    }

    // Any row, by one warp: bisects the K-th largest key bit by bit, then takes the lowest ids among its equals.
    static __device__ __noinline__ void select_exact(u32 s, const Logit* row, const f32* bias, u32 lane) {
#pragma unroll 4
        for (u32 e = lane; e < E; e += kWarp)
            ptx::store_shared_if(true, s + Scratch::kKeys + e * 4,
                                 key_of(rank_of(score_of(load_logit(row + e)), __ldg(bias + e))));
        u32 kth = 0;
#pragma unroll 1
        for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
            if (count_reaching(s, kth | bit, lane) >= K) kth |= bit;
        }
        u32 equals_left = K - (kth == 0xffffffffu ? 0 : count_reaching(s, kth + 1, lane));
        const u32 below = (1u << lane) - 1;
        u32 slot = 0;
#pragma unroll 1
        for (u32 e = lane; e < E; e += kWarp) {
            const u32 key = ptx::load_shared(s + Scratch::kKeys + e * 4);
            const u32 equal = __ballot_sync(kFullWarp, key == kth);
            const bool wins = key > kth || (key == kth && __popc(equal & below) < equals_left);
            equals_left -= smaller<u32>(equals_left, __popc(equal));
            const u32 mask = __ballot_sync(kFullWarp, wins);
            if (wins) {
                const u32 at = slot + __popc(mask & below);
                ptx::store_shared_if(true, s + Scratch::kTerms + at * 4,
                                     __float_as_uint(weight_term(score_of(load_logit(row + e)), key)));
                ptx::store_shared_u16_if(true, s + Scratch::kIds + at * 2, e);
            }
            slot += __popc(mask);
        }
        __syncwarp();
    }

    static __device__ __forceinline__ u32 count_reaching(u32 s, u32 key, u32 lane) {
        u32 reach = 0;
#pragma unroll 7
        for (u32 e = lane; e < E; e += kWarp) reach += ptx::load_shared(s + Scratch::kKeys + e * 4) >= key;
        return ptx::warp_sum(reach);
    }
};

// Rehearsal. On a cold chip a short kernel waits longer for its own instructions and parameters than for anything else, so
// spare warps run the steps ahead of the row's warps, each one step on made-up data in a scratch of its own, while the
// logits are on their way. The data make a step take its usual path.
template <typename Selection>
__device__ __forceinline__ void make_up(u32 s, u32 lane, typename Selection::State& state) {
    using Scratch = typename Selection::Scratch;
    const u32 value = __float_as_uint(static_cast<f32>(lane));
    ptx::store_shared_if(true, s + Scratch::kBounds + lane * 4, value);
    ptx::store_shared_if(true, s + Scratch::kList + lane * 8, value, lane);
    ptx::store_shared_if(lane < Selection::K, s + Scratch::kTerms + lane % Selection::K * 4, __float_as_uint(1.0f));
    ptx::store_shared_if(lane == 0, s + Scratch::kTotal, 32u);
#pragma unroll
    for (i32 j = 0; j < Selection::ITEMS; ++j) state.rank[j] = state.score[j] = static_cast<f32>(lane) - 8 * j;
    state.floor_key = 1;
    __syncwarp();
}

}  // namespace fused_router
