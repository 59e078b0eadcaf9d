// Top-k selection of one row by four warps, for least latency: one exchange of bounds, one of candidates.
//
// Warp q of the four owns the experts [E/4*q, E/4*(q+1)), ITEMS = E/128 of them per lane, 32 apart, so that
// (warp, item, lane) is ascending expert id and each of the 4*ITEMS "groups" of 32 experts is one register of one warp.
//
// 1. Bound of a group = its largest rank value. All bounds go to shared memory; barrier.
// 2. Floor = the largest bound that at least K bounds reach. They are K different experts, so no winner is below it.
// 3. Candidates = experts at or above the floor (896 experts of random rows: mean 23, over 32 in 1 % of rows), compacted
//    in id order; barrier. The other three warps are done.
// 4. The finishing warp ranks up to 64 candidates against each other; more (ties, NaN rows) take select_exact.
//
// Ranks are counted in the FMA pipe: saturate((a - b) * 2^96) is 1 if a > b and 0 if a <= b; it lies between, or is 0
// after a NaN, only for values that differ by less than 2^-96 or are not finite. So a count is never too large: a floor is
// never too high, and the set of candidates with count < K contains all winners. Only if it has more than K members (ties
// at the boundary, or such values) are they ordered again by integer keys.
#pragma once
#include "common/types.cuh"
#include "fused_router/score.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

constexpr i32 kQuad = 4;                                       // warps that share a row
constexpr f32 kStep = 79228162514264337593543950336.0f;        // 2^96
constexpr f32 kLowest = -3.402823466e38f;                    // ranks below every candidate

struct Candidate {
    f32 rank;
    f32 score;
    u32 id;
    u32 unused;
};

constexpr i32 kRegion = 32;  // candidates that one warp may contribute

// Shared memory of one row in flight.
template <i32 E, i32 K>
struct alignas(16) RowScratch {
    f32 bounds[32];
    union {
        Candidate candidates[kQuad][kRegion];
        u32 keys[E];  // select_exact only
    };
    f32 terms[K];   // weight terms of the winners, ascending id
    u16 ids[K];     // their experts
    u8 counts[16];  // candidates of each warp, at most kRegion + 1; only the first kQuad are used
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

    static __device__ __forceinline__ u32 first_expert(u32 q) {
        return q * (ITEMS * kWarp) + ptx::lane_id();
    }

    static __device__ __forceinline__ Row load(const Logit* row, u32 q) {
        Row v;
        const Logit* at = row + first_expert(q);
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) v.x[j] = load_logit(at + j * kWarp);
        return v;
    }

    static __device__ __forceinline__ Row load_bias(const f32* bias, u32 q) {
        Row v;
        const f32* at = bias + first_expert(q);
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) v.x[j] = __ldg(at + j * kWarp);
        return v;
    }

    // Pads of the bounds that no warp publishes: a NaN is never counted. Once per scratch, before the first row.
    static __device__ __forceinline__ void prepare(Scratch& s, u32 thread) {
        if (thread >= kQuad * SLOTS && thread < 32) s.bounds[thread] = __uint_as_float(0x7fffffffu);
    }

    // What a warp carries from one step to the next.
    struct State {
        f32 score[ITEMS];
        f32 rank[ITEMS];
        u32 floor_key;
    };

    // Step 1, by all four warps; a barrier of the four follows.
    static __device__ __forceinline__ void bound(Scratch& s, const Row& x, const Row& bias, u32 q, State& state) {
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            state.score[j] = score_of(x.x[j]);
            state.rank[j] = rank_of(state.score[j], bias.x[j]);
        }
        publish_bounds(s, state.rank, q);
    }

    // Steps 2 and 3, by all four warps; a barrier of the four follows.
    static __device__ __forceinline__ void gather(Scratch& s, u32 q, State& state) {
        state.floor_key = find_floor(s);
        if (state.floor_key != kNanKey) compact(s, state.rank, state.score, value_of(state.floor_key), q);
    }

    // Step 4, by the finishing warp, all lanes.
    static __device__ __forceinline__ void finish(Scratch& s, const Logit* row, const f32* bias, bool complete) {
        const u32 prefix = *reinterpret_cast<const u32*>(s.counts) * 0x01010101u;  // byte i: candidates of warps 0..i
        const u32 total = prefix >> 24;
        if (complete && total <= 32) {
            rank_candidates<1>(s, prefix);
        } else if (complete && total <= 64 && fits(s)) {
            rank_many(s, prefix);
        } else {
            select_exact(s, row, bias);
        }
        __syncwarp();
    }

private:
    // Inverse of key_of.
    static __device__ __forceinline__ f32 value_of(u32 key) {
        return __uint_as_float((key & 0x80000000u) ? key ^ 0x80000000u : ~key);
    }

    static __device__ __forceinline__ bool fits(const Scratch& s) {
        bool ok = true;
#pragma unroll
        for (i32 q = 0; q < kQuad; ++q) ok &= s.counts[q] <= kRegion;
        return ok;
    }

    // Floats compare like signed integers unless both are negative; then the integer maximum is the float minimum. Any
    // member of a group is a valid bound, so this only decides how good the bound is; a positive NaN becomes a NaN bound,
    // which counts for nothing.
    static __device__ __forceinline__ void publish_bounds(Scratch& s, const f32 (&rank)[ITEMS], u32 q) {
        i32 top[SLOTS];
        i32 all = 0;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            top[j] = ptx::warp_max(__float_as_int(rank[j]));
            all |= top[j];
        }
        if (all < 0) {
#pragma unroll
            for (i32 j = 0; j < ITEMS; ++j)
                if (top[j] < 0) top[j] = ptx::warp_min(__float_as_int(rank[j]));
        }
#pragma unroll
        for (i32 j = ITEMS; j < SLOTS; ++j) top[j] = 0x7fffffff;
        if (ptx::lane_id() == 0) {
            int4* to = reinterpret_cast<int4*>(s.bounds + q * SLOTS);
#pragma unroll
            for (i32 j = 0; j < SLOTS; j += 4) to[j / 4] = make_int4(top[j], top[j + 1], top[j + 2], top[j + 3]);
        }
    }

    // Key of the largest bound above which at least K - 1 others lie, or kNanKey if there is none.
    static __device__ __forceinline__ u32 find_floor(const Scratch& s) {
        const f32 own = s.bounds[ptx::lane_id()];
        const f32 minus_own = -own * kStep;
        f32 above[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (i32 i = 0; i < kQuad * SLOTS; i += 4) {
            const float4 b = *reinterpret_cast<const float4*>(s.bounds + i);
            const f32 other[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (i32 j = 0; j < 4; ++j)
                if ((i + j) % SLOTS < ITEMS) above[j] += ptx::fma_saturate(other[j], kStep, minus_own);
        }
        const f32 count = (above[0] + above[1]) + (above[2] + above[3]);
        // Below -2^31 `minus_own` may overflow to +inf, which would count everything.
        return ptx::warp_max(count >= K - 1 && own > -2147483648.0f ? key_of(own) : kNanKey);
    }

    static __device__ __forceinline__ void compact(Scratch& s, const f32 (&rank)[ITEMS], const f32 (&score)[ITEMS],
                                                   f32 floor, u32 q) {
        const u32 below = ptx::lanes_below();
        const u32 expert = first_expert(q);
        u32 count = 0;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            const bool in = rank[j] >= floor;
            const u32 mask = __ballot_sync(kFullWarp, in);
            const u32 at = count + __popc(mask & below);
            if (in && at < kRegion) s.candidates[q][at] = {rank[j], score[j], expert + j * kWarp, 0};
            count += __popc(mask);
        }
        if (ptx::lane_id() == 0) s.counts[q] = static_cast<u8>(smaller<u32>(count, kRegion + 1));
    }

    // Where candidate `i` of all lies in the regions. `prefix` as in finish().
    static __device__ __forceinline__ u32 locate(u32 prefix, u32 i) {
        u32 at = i;
#pragma unroll
        for (i32 q = 1; q < kQuad; ++q) {
            const u32 before = (prefix >> (8 * (q - 1))) & 0xffu;
            if (i >= before) at = q * kRegion + i - before;
        }
        return at;
    }

    // Candidates i and (S = 2) i + 32 belong to lane i. Writes the winners to s.terms and s.ids.
    template <i32 S>
    static __device__ __forceinline__ void rank_candidates(Scratch& s, u32 prefix) {
        const u32 lane = ptx::lane_id();
        const u32 total = prefix >> 24;
        Candidate c[S];
        f32 minus_own[S];
        f32 above[S][4];
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            const u32 i = lane + 32 * h;
            c[h] = {kLowest, 0.0f, 0, 0};
            if (i < total) c[h] = (&s.candidates[0][0])[locate(prefix, i)];
            minus_own[h] = -c[h].rank * kStep;
#pragma unroll
            for (i32 a = 0; a < 4; ++a) above[h][a] = 0.0f;
        }
#pragma unroll
        for (i32 i = 0; i < 32 * S; i += 8) {
            if (i < K || i < total) {
#pragma unroll
                for (i32 j = 0; j < 8; ++j) {
                    const f32 other = __shfl_sync(kFullWarp, c[(i + j) / 32].rank, (i + j) % 32);
#pragma unroll
                    for (i32 h = 0; h < S; ++h) above[h][j % 4] += ptx::fma_saturate(other, kStep, minus_own[h]);
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
        if (winners != K) settle<S>(c, wins, mask, total);
        u32 slot = __popc(mask[0] & ptx::lanes_below());
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            if (h > 0) slot = __popc(mask[0]) + __popc(mask[h] & ptx::lanes_below());
            if (wins[h]) {
                s.terms[slot] = c[h].score;
                s.ids[slot] = static_cast<u16>(c[h].id);
            }
        }
    }

    // Out of line: it is rare, and its code would only spread the common path.
    static __device__ __noinline__ void rank_many(Scratch& s, u32 prefix) {
        rank_candidates<2>(s, prefix);
    }

    // More than K candidates seem to win: order them by key and, where keys are equal, by position. Rare.
    template <i32 S>
    static __device__ __forceinline__ void settle(const Candidate (&c)[S], bool (&wins)[S], u32 (&mask)[S], u32 total) {
        u64 own[S];
        i32 above[S];
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            own[h] = order_of(key_of(c[h].rank), c[h].id);
            above[h] = 0;
        }
#pragma unroll 1
        for (u32 i = 0; i < total; ++i) {
            u64 other = __shfl_sync(kFullWarp, own[0], i % 32);
            if (S > 1) {
                const u64 upper = __shfl_sync(kFullWarp, own[S - 1], i % 32);
                if (i >= 32) other = upper;
            }
#pragma unroll
            for (i32 h = 0; h < S; ++h) above[h] += other > own[h];
        }
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            wins[h] = above[h] < K && ptx::lane_id() + 32 * h < total;
            mask[h] = __ballot_sync(kFullWarp, wins[h]);
        }
    }

    // Any row, by one warp: bisects the K-th largest key bit by bit, then takes the lowest ids among its equals.
    static __device__ __noinline__ void select_exact(Scratch& s, const Logit* row, const f32* bias) {
        const u32 lane = ptx::lane_id();
#pragma unroll 4
        for (u32 e = lane; e < E; e += kWarp)
            s.keys[e] = key_of(rank_of(score_of(load_logit(row + e)), __ldg(bias + e)));
        u32 kth = 0;
#pragma unroll 1
        for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
            if (count_reaching(s, kth | bit) >= K) kth |= bit;
        }
        u32 equals_left = K - (kth == 0xffffffffu ? 0 : count_reaching(s, kth + 1));
        u32 slot = 0;
#pragma unroll 1
        for (u32 e = lane; e < E; e += kWarp) {
            const u32 key = s.keys[e];
            const u32 equal = __ballot_sync(kFullWarp, key == kth);
            const bool wins = key > kth || (key == kth && __popc(equal & ptx::lanes_below()) < equals_left);
            equals_left -= smaller<u32>(equals_left, __popc(equal));
            const u32 mask = __ballot_sync(kFullWarp, wins);
            if (wins) {
                const u32 at = slot + __popc(mask & ptx::lanes_below());
                s.terms[at] = weight_term(score_of(load_logit(row + e)), key);
                s.ids[at] = static_cast<u16>(e);
            }
            slot += __popc(mask);
        }
    }

    static __device__ __forceinline__ u32 count_reaching(const Scratch& s, u32 key) {
        u32 reach = 0;
#pragma unroll 7
        for (u32 e = ptx::lane_id(); e < E; e += kWarp) reach += s.keys[e] >= key;
        return ptx::warp_sum(reach);
    }
};

// Writes one row's weights and ids from the finishing warp, when its winners are in `s`.
template <i32 E, i32 K>
__device__ __forceinline__ void write_row(const RowScratch<E, K>& s, bool live, f32* weights, i32* ids, i32 renormalize,
                                          f32 factor) {
    f32 all[K];
#pragma unroll
    for (i32 i = 0; i < K; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(s.terms + i);
        all[i] = v.x;
        all[i + 1] = v.y;
        all[i + 2] = v.z;
        all[i + 3] = v.w;
    }
    const u32 lane = ptx::lane_id();
    const bool writes = live && lane < K;
    const u32 own = lane % K;
    if (writes) ids[lane] = s.ids[own];
    const f32 weight = weight_of(s.terms[own], sum_terms<K>(all), renormalize, factor);
    if (writes) weights[lane] = weight;
}

// Rehearsal. A kernel that runs once on a cold chip spends more time waiting for its own instructions than for anything
// else, so spare warps run the steps ahead of the row's warps, each one step on made-up data in a scratch of its own,
// while the logits are on their way. `step` is the step that the warp is about to rehearse; the data make it take the
// usual path.
template <typename Selection>
__device__ __forceinline__ void make_up(typename Selection::Scratch& s, typename Selection::State& state) {
    const u32 lane = ptx::lane_id();
    const f32 value = static_cast<f32>(lane);
    s.bounds[lane] = value;
#pragma unroll
    for (i32 q = 0; q < kQuad; ++q) s.candidates[q][lane] = {value + q * 32, value, lane, 0};
    if (lane < Selection::K) s.terms[lane] = 1.0f;
    if (lane < kQuad) s.counts[lane] = 8;
#pragma unroll
    for (i32 j = 0; j < Selection::ITEMS; ++j) state.rank[j] = state.score[j] = value;
    state.floor_key = 1;
    __syncwarp();
}

}  // namespace fused_router
