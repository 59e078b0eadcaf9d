// Top-k selection of one row by four warps, for least latency: one exchange of bounds, one of candidates.
//
// Warp q of the four owns the experts [E/4*q, E/4*(q+1)), ITEMS = E/128 of them per lane, 32 apart.
//
// 1. Bound of a group = the largest rank value of 32 consecutive experts. All bounds go to shared memory; barrier.
// 2. Floor = the largest bound that at least K bounds reach. They are K different experts, so no winner is below it.
// 3. Candidates = experts at or above the floor (896 experts of random rows: mean 23, over 32 in 1 % of rows). A lane
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
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

constexpr i32 kQuad = 4;                                 // warps that share a row
constexpr f32 kStep = 79228162514264337593543950336.0f;  // 2^96
constexpr f32 kLowest = -3.402823466e38f;                // ranks below every candidate
constexpr i32 kCandidates = 64;                          // places of the list
constexpr u32 kNoExpert = 0xffffu;                       // in a place without a candidate

struct alignas(8) Candidate {
    f32 rank;
    u32 id;
};

// Shared memory of one row in flight.
template <i32 E, i32 K>
struct alignas(16) RowScratch {
    f32 bounds[32];
    union {
        struct {
            Candidate candidates[kCandidates];
            f32 scores[kCandidates];
        };
        u32 keys[E];  // select_exact only
    };
    f32 terms[K];  // weight terms of the winners, ascending id
    u16 ids[K];    // their experts
    u32 total;     // candidates; may exceed the places
    u32 unused[3];
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

    // Once per scratch, before the first row. Bounds that no warp publishes are NaN, which is never counted.
    static __device__ __forceinline__ void prepare(Scratch& s, u32 thread) {
        if (thread >= kQuad * SLOTS && thread < 32) s.bounds[thread] = __uint_as_float(0x7fffffffu);
        if (thread < kCandidates) s.candidates[thread] = {kLowest, kNoExpert};
        if (thread == 0) s.total = 0;
    }

    // Steps 1 to 3, by all four warps. Returns false if there is no floor: then only select_exact can help.
    static __device__ __forceinline__ bool gather(Scratch& s, const Row& x, const Row& bias, u32 q, u32 barrier) {
        f32 score[ITEMS];
        f32 rank[ITEMS];
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            score[j] = score_of(x.x[j]);
            rank[j] = rank_of(score[j], bias.x[j]);
        }
        publish_bounds(s, rank, q);
        ptx::barrier_sync_aligned(barrier, kQuad * kWarp);
        const u32 floor_key = find_floor(s);
        if (floor_key != kNanKey) list(s, rank, score, value_of(floor_key), q);
        ptx::barrier_sync_aligned(barrier, kQuad * kWarp);
        return floor_key != kNanKey;
    }

    // Step 4, by the finishing warp. The winners are in s.ids and s.terms, and each in one lane.
    static __device__ __forceinline__ Winner finish(Scratch& s, const Logit* row, const f32* bias, bool has_floor) {
        const u32 total = s.total;
        Winner w;
        if (has_floor && total <= 32) {
            w = rank_candidates<1>(s, total);
        } else {
            if (has_floor && total <= kCandidates) {
                rank_many(s, total);
            } else {
                select_exact(s, row, bias);
            }
            __syncwarp();
            const u32 lane = ptx::lane_id() % K;
            w = {ptx::lane_id() < K, lane, s.ids[lane], s.terms[lane]};
        }
        __syncwarp();
        for (u32 i = ptx::lane_id(); i < kCandidates; i += kWarp) s.candidates[i] = {kLowest, kNoExpert};
        if (ptx::lane_id() == 0) s.total = 0;
        return w;
    }

    // Writes the row's weights and ids, by the finishing warp.
    static __device__ __forceinline__ void write(const Scratch& s, const Winner& w, f32* weights, i32* ids,
                                                 i32 renormalize, f32 factor) {
        f32 all[K];
#pragma unroll
        for (i32 i = 0; i < K; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(s.terms + i);
            all[i] = v.x;
            all[i + 1] = v.y;
            all[i + 2] = v.z;
            all[i + 3] = v.w;
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
    static __device__ __forceinline__ void publish_bounds(Scratch& s, const f32 (&rank)[ITEMS], u32 q) {
        i32 top[SLOTS];
        i32 all = 0;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            top[j] = ptx::warp_max(__float_as_int(rank[j]));
            all |= top[j];
        }
#pragma unroll
        for (i32 j = ITEMS; j < SLOTS; ++j) top[j] = 0x7fffffff;
        store_bounds(s, top, q);
        if (all < 0) {
#pragma unroll
            for (i32 j = 0; j < ITEMS; ++j) {
                const i32 lowest = ptx::warp_min(__float_as_int(rank[j]));
                if (top[j] < 0) top[j] = lowest;
            }
            store_bounds(s, top, q);
        }
    }

    static __device__ __forceinline__ void store_bounds(Scratch& s, const i32 (&top)[SLOTS], u32 q) {
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

    static __device__ __forceinline__ void list(Scratch& s, const f32 (&rank)[ITEMS], const f32 (&score)[ITEMS],
                                                f32 floor, u32 q) {
        u32 count = 0;
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) count += rank[j] >= floor;
        if (count == 0) return;
        const u32 expert = first_expert(q);
        u32 at = ptx::shared_fetch_add(ptx::shared_address(&s.total), count);
#pragma unroll
        for (i32 j = 0; j < ITEMS; ++j) {
            if (rank[j] >= floor && at < kCandidates) {
                s.candidates[at] = {rank[j], expert + j * kWarp};
                s.scores[at] = score[j];
                ++at;
            }
        }
    }

    // Candidates i and (S = 2) i + 32 belong to lane i.
    template <i32 S>
    static __device__ __forceinline__ Winner rank_candidates(Scratch& s, u32 total) {
        const u32 lane = ptx::lane_id();
        Candidate c[S];
        f32 score[S];
        f32 minus_own[S];
        f32 above[S][4];
        u32 lower[S][S];  // candidates with lower ids, as masks of lanes
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            c[h] = s.candidates[lane + 32 * h];
            score[h] = s.scores[lane + 32 * h];
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
                for (i32 j = 0; j < 8; ++j) {
                    const Candidate other = s.candidates[i + j];
#pragma unroll
                    for (i32 h = 0; h < S; ++h) {
                        above[h][j % 4] += ptx::fma_saturate(other.rank, kStep, minus_own[h]);
                        if (other.id < c[h].id) lower[h][i / 32] |= 1u << ((i + j) % 32);
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
        if (winners != K) settle<S>(s, c, wins, mask, total);
        Winner w{false, 0, 0, 0.0f};
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            u32 slot = 0;
#pragma unroll
            for (i32 g = 0; g < S; ++g) slot += __popc(mask[g] & lower[h][g]);
            if (wins[h]) {
                s.terms[slot] = score[h];
                s.ids[slot] = static_cast<u16>(c[h].id);
                w = {true, slot, c[h].id, score[h]};
            }
        }
        __syncwarp();
        return w;
    }

    // Out of line: it is rare, and its code would only spread the common path.
    static __device__ __noinline__ void rank_many(Scratch& s, u32 total) {
        rank_candidates<2>(s, total);
    }

    // More than K candidates seem to win: order them by key, then id. Rare.
    template <i32 S>
    static __device__ __forceinline__ void settle(const Scratch& s, const Candidate (&c)[S], bool (&wins)[S],
                                                  u32 (&mask)[S], u32 total) {
        u64 own[S];
        i32 above[S];
#pragma unroll
        for (i32 h = 0; h < S; ++h) {
            own[h] = order_of(key_of(c[h].rank), c[h].id);
            above[h] = 0;
        }
#pragma unroll 1
        for (u32 i = 0; i < total; ++i) {
            const u64 other = order_of(key_of(s.candidates[i].rank), s.candidates[i].id);
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

}  // namespace fused_router
