// One warp selects one row: the throughput side's selection. Experts are seen in groups of 4 (one 16-byte load of logits);
// lane l owns groups l, l + 32, l + 64, ... so that loads are coalesced and (group, place in group) is the expert order.
//
// 1. Filter. v = tanh.approx(x / 2) / 2 + bias is the rank value minus 1/2, up to a proven error. T, the K-th largest of
//    the 32 lane maxima of v, is reached by K different experts, so no winner's v lies more than the error twice below T.
// 2. The groups whose maximum passes that bound (some 20 of 224) are compacted, one a lane, and get exact rank values. If
//    more than 24 pass, T is raised first, as far as K groups still reach it: with 24 groups hardly a row has more than 32
//    candidates, and a row that has takes ten times as long.
// 3. The experts that pass the exact bound (some 20) are compacted again, one a lane, in ascending order of id.
// 4. The K-th largest exact key decides; equal keys go to the lower ids.
// Rows that still have more than 32 groups or candidates (ties), or too few numbers, take the exact path without a filter.
#pragma once
#include "common/types.cuh"
#include "fused_router/score.cuh"
#include "ptx/filter.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"

namespace fused_router {

// |v + 1/2 - rank| <= kFilterError + kFilterRounding * |rank|. tanh.approx may err by 2^-11 / 2 = 2.4415e-4 (instruction
// set's bound); the score's own error, below 4e-6, and the roundings of both sums, below 2^-22 of their size, are covered by
// what is added on top. On compute capability 9.0 the largest |v + 1/2 - score| over all floats is 4.0e-6 (all were tried).
#if __CUDA_ARCH__ == 900
constexpr f32 kFilterError = 6.0e-6f;
#else
constexpr f32 kFilterError = 2.6e-4f;
#endif
constexpr f32 kFilterRounding = 1.0f / (1 << 20);

// What one warp needs in shared memory, reached by its 32-bit address.
template <int K>
struct WarpScratch {
    static constexpr u32 kLogits = 0;                // 32 x 16 bytes: widened logits of candidate groups
    static constexpr u32 kItems = kLogits + 32 * 16;  // 32 x 16 bytes: candidates as key, score, id
    static constexpr u32 kTerms = kItems + 32 * 16;   // K x 4 bytes: winners' weight terms
    static constexpr u32 kGroups = kTerms + K * 4;    // 32 x 2 bytes: groups of kLogits
    static constexpr u32 kIds = kGroups + 32 * 2;     // K x 2 bytes: winners
    static constexpr u32 kBytes = kIds + K * 2;
    uint4 memory[kBytes / 16];
    static_assert(kBytes % 16 == 0, "scratch is laid out in 16-byte units");

    __device__ __forceinline__ u32 address() const { return ptx::shared_address(memory); }
};

// A winner of a row, in lane order = ascending id; only the lanes below K hold one.
struct Winner {
    u32 id;
    f32 weight;
};

// Unsigned key of a number that is no NaN, and back.
__device__ __forceinline__ u32 key_of_number(f32 v) {
    const i32 bits = __float_as_int(v);
    return static_cast<u32>(bits) ^ (static_cast<u32>(bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ f32 number_of_key(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// One step of a sorting network over lanes: the lanes with `upper` keep the larger of their own and the partner's key.
template <int kPartner>
__device__ __forceinline__ u32 exchange(u32 key, bool upper) {
    const u32 other = __shfl_xor_sync(kFullWarp, key, kPartner);
    return upper ? max(key, other) : min(key, other);
}

// The K-th largest of the warp's 32 keys. Sorts runs of K lanes, then merges away the smaller half until one run is left.
template <int K>
__device__ __forceinline__ u32 kth_largest(u32 key, u32 lane) {
    static_assert(K == 8 || K == 16, "a network exists for top 8 and top 16");
    const bool bit0 = lane & 1, bit1 = lane & 2, bit2 = lane & 4, bit3 = lane & 8;
    key = exchange<1>(key, bit0);
    key = exchange<3>(key, bit1);
    key = exchange<1>(key, bit0);
    key = exchange<7>(key, bit2);
    key = exchange<2>(key, bit1);
    key = exchange<1>(key, bit0);
    if (K == 16) {
        key = exchange<15>(key, bit3);
        key = exchange<4>(key, bit2);
        key = exchange<2>(key, bit1);
        key = exchange<1>(key, bit0);
        key = exchange<31>(key, true);
    } else {
        key = exchange<15>(key, true);
        key = exchange<4>(key, bit2);
        key = exchange<2>(key, bit1);
        key = exchange<1>(key, bit0);
        key = exchange<23>(key, true);
    }
    return ptx::warp_min(key);
}

// The same by counting, through 128 bytes of shared memory at `keys_at`: half the latency, three times the instructions.
template <int K>
__device__ __forceinline__ u32 kth_largest_counted(u32 key, u32 lane, u32 keys_at) {
    ptx::store_shared_if(true, keys_at + lane * 4, key);
    __syncwarp();
    u32 larger = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 v = ptx::load_shared_v4(keys_at + i * 16);
        larger += (v.x > key ? 1 : 0) + (v.y > key ? 1 : 0) + (v.z > key ? 1 : 0) + (v.w > key ? 1 : 0);
    }
    return ptx::warp_min(larger < K ? key : 0xffffffffu);
}

// Exclusive prefix over lanes of counts 0..7, and their total.
struct LanePrefix {
    u32 before;
    u32 total;
};

__device__ __forceinline__ LanePrefix prefix_of_small(u32 count, u32 below) {
    const u32 b0 = __ballot_sync(kFullWarp, count & 1), b1 = __ballot_sync(kFullWarp, count & 2);
    const u32 b2 = __ballot_sync(kFullWarp, count & 4);
    return {static_cast<u32>(__popc(b0 & below) + 2 * __popc(b1 & below) + 4 * __popc(b2 & below)),
            static_cast<u32>(__popc(b0) + 2 * __popc(b1) + 4 * __popc(b2))};
}

// kQuick: for few rows a multiprocessor, where latency counts and instructions do not.
template <int E, int K, typename T, bool kQuick>
struct WarpSelect {
    static constexpr int kGroups = E / 128;  // groups of 4 experts a lane
    static_assert(E % 128 == 0 && E <= 4096 && K < E, "experts come in 32 lanes x 4");
    using Raw = typename RawLogits4<T>::type;

    struct Row {
        Raw raw[kGroups];
    };
    struct Bias {
        uint4 raw[kGroups];
    };

    // `logits`, `from`: the row's (the bias's) element 4 * lane.
    static __device__ __forceinline__ void load(Row& row, const T* logits) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) row.raw[j] = load_once(logits + j * 128);
    }

    static __device__ __forceinline__ void load(Bias& bias, const f32* from) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) bias.raw[j] = ptx::load_readonly_v4(from + j * 128);
    }

    // Selects the row at `logits`, whose values are in `row`. All lanes take part. `scratch` is a WarpScratch's address; it is
    // free for reuse by this warp after its next __syncwarp().
    static __device__ __forceinline__ Winner select(const Row& row, const Bias& bias, const T* logits, const f32* bias_at,
                                                    i32 renormalize, f32 factor, u32 scratch, u32 lane) {
        if (!select_filtered(row, bias, bias_at, scratch, lane)) select_exact(logits, bias_at, scratch, lane);
        __syncwarp();
        f32 terms[K];
#pragma unroll
        for (int i = 0; i < K / 4; ++i) {
            const uint4 four = ptx::load_shared_v4(scratch + Scratch::kTerms + i * 16);
            terms[4 * i] = __uint_as_float(four.x), terms[4 * i + 1] = __uint_as_float(four.y);
            terms[4 * i + 2] = __uint_as_float(four.z), terms[4 * i + 3] = __uint_as_float(four.w);
        }
        const f32 sum = sum_terms<K>(terms);
        const u32 slot = lane % K;
        const f32 own = __uint_as_float(ptx::load_shared(scratch + Scratch::kTerms + slot * 4));
        return {ptx::load_shared_u16(scratch + Scratch::kIds + slot * 2), weight_of(own, sum, renormalize, factor)};
    }

  private:
    using Scratch = WarpScratch<K>;

    static __device__ __forceinline__ uint4 load_once(const f32* at) { return ptx::load_once_v4(at); }
    static __device__ __forceinline__ uint2 load_once(const bf16* at) { return ptx::load_once_v2(at); }

    // Steps 1 to 4. Leaves terms and ids of the winners in the scratch, or returns false (for the whole warp).
    static __device__ __forceinline__ bool select_filtered(const Row& row, const Bias& bias, const f32* bias_at, u32 scratch,
                                                           u32 lane) {
        f32 group_max[kGroups];
        const f32 lane_max = filter_values(row, bias, group_max);
        const u32 lane_key = key_of_number(lane_max);
        const u32 least = kQuick ? kth_largest_counted<K>(lane_key, lane, scratch + Scratch::kItems) : kth_largest<K>(lane_key, lane);
        Bounds bounds = bounds_at(least);
        u32 who[kGroups];
        u32 count = ballots(group_max, bounds.group, who);
        if (count > kMostGroups) {
            bounds = raise(group_max, lane_max, least);
            count = ballots(group_max, bounds.group, who);
            if (count > 32) return false;
        }
        const u32 below = ptx::lanes_below();
        u32 base = 0;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const bool passes = group_max[j] >= bounds.group;
            const u32 at = base + __popc(who[j] & below);
            const Logits4 x = as_logits(row.raw[j]);
            ptx::store_shared_if(passes, scratch + Scratch::kLogits + at * 16,
                                 make_uint4(__float_as_uint(x.x[0]), __float_as_uint(x.x[1]), __float_as_uint(x.x[2]),
                                            __float_as_uint(x.x[3])));
            ptx::store_shared_u16_if(passes, scratch + Scratch::kGroups + at * 2, j * 32 + lane);
            base += __popc(who[j]);
        }
        __syncwarp();
        return rank_groups(count, bounds.exact, bias_at, scratch, lane, below);
    }

    static constexpr u32 kMostGroups = 24;

    // What a winner reaches if K experts reach v = `number_of_key(least)`: its group's v, and its exact rank value. NaN
    // (nothing passes) where that v is +inf.
    struct Bounds {
        f32 group;
        f32 exact;
    };

    static __device__ __forceinline__ Bounds bounds_at(u32 least) {
        const f32 v = number_of_key(least);
        const f32 error = fmaf(fabsf(v), 2 * kFilterRounding, kFilterError);
        return {v - 2.02f * error, (v + 0.5f) - error};  // the second error is taken at a value slightly below v
    }

    // Which lanes' groups j reach `bound`; returns how many do in all.
    static __device__ __forceinline__ u32 ballots(const f32 (&group_max)[kGroups], f32 bound, u32 (&who)[kGroups]) {
        u32 count = 0;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            who[j] = __ballot_sync(kFullWarp, group_max[j] >= bound);
            count += __popc(who[j]);
        }
        return count;
    }

    // Bounds from a value above `least` that K groups still reach, if possible one that few more reach: halves the keys
    // between, and stops when they are used up, as they are when many groups tie.
    static __device__ __forceinline__ Bounds raise(const f32 (&group_max)[kGroups], f32 lane_max, u32 least) {
        u32 most = ptx::warp_max(key_of_number(lane_max));  // fewer than K groups may reach it
        u32 who[kGroups];
#pragma unroll 1
        while (most - least > 1) {
            const u32 middle = least + (most - least) / 2;
            if (ballots(group_max, number_of_key(middle), who) >= K) {
                least = middle;
                if (ballots(group_max, bounds_at(least).group, who) <= kMostGroups) break;
            } else {
                most = middle;
            }
        }
        return bounds_at(least);
    }

    // v of every element; returns the lane's largest, -inf if there is no number.
    static __device__ __forceinline__ f32 filter_values(const Row& row, const Bias& bias, f32 (&group_max)[kGroups]) {
        f32 lane_max = __uint_as_float(0xff800000u);  // -inf
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const Logits4 x = as_logits(row.raw[j]), b = as_logits(bias.raw[j]);
            f32 v[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) v[c] = fmaf(0.5f, ptx::tanh_approx(0.5f * x.x[c]), b.x[c]);
            group_max[j] = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));  // fmaxf passes a NaN by
            lane_max = fmaxf(lane_max, group_max[j]);
        }
        return lane_max;
    }

    // Steps 2 to 4 for `count` <= 32 candidate groups.
    static __device__ __forceinline__ bool rank_groups(u32 count, f32 exact_bound, const f32* bias_at, u32 scratch, u32 lane,
                                                       u32 below) {
        const bool present = lane < count;  // lanes without a group compute on what lies there; nothing of it is used
        const u32 id = (ptx::load_shared_u16(scratch + Scratch::kGroups + lane * 2) & (E / 4 <= 128 ? 127u : 255u)) * 4;
        const Logits4 x = as_logits(ptx::load_shared_v4(scratch + Scratch::kLogits + lane * 16));
        const Logits4 b = as_logits(ptx::load_readonly_v4(bias_at + (present ? id : 0)));
        u32 passing = 0;
        f32 rank[4], score[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            score[c] = score_of(x.x[c]);
            rank[c] = rank_of(score[c], b.x[c]);
            passing |= (present && rank[c] >= exact_bound ? 1u : 0u) << c;
        }
        const LanePrefix place = prefix_of_small(__popc(passing), below);
        if (place.total < K || place.total > 32) return false;
        u32 at = scratch + Scratch::kItems + place.before * 16;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const bool passes = passing & (1u << c);
            ptx::store_shared_if(passes, at, make_uint4(key_of_number(rank[c]), __float_as_uint(score[c]), id + c, 0));
            at += passes ? 16 : 0;
        }
        __syncwarp();
        const uint4 item = ptx::load_shared_v4(scratch + Scratch::kItems + lane * 16);
        const u32 key = lane < place.total ? item.x : 0;
        const u32 limit = kQuick ? kth_largest_counted<K>(key, lane, scratch + Scratch::kLogits) : kth_largest<K>(key, lane);
        const u32 above = __ballot_sync(kFullWarp, key > limit), equal = __ballot_sync(kFullWarp, key == limit);
        const bool wins = key > limit || (key == limit && __popc(above) + __popc(equal & below) < K);
        const u32 slot = __popc(__ballot_sync(kFullWarp, wins) & below);
        ptx::store_shared_if(wins, scratch + Scratch::kTerms + slot * 4, item.y);
        ptx::store_shared_u16_if(wins, scratch + Scratch::kIds + slot * 2, item.z);
        return true;
    }

    // Exact and slow: finds the K-th largest key by halving; its last places go to the lowest ids.
    static __device__ __forceinline__ void select_exact(const T* logits, const f32* bias_at, u32 scratch, u32 lane) {
        __syncwarp();  // the scratch is free: all lanes have read the row before
        u32 keys[kGroups][4], lane_max = 0;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const u32 at = (j * 32 + lane) * 4;
            const Logits4 x = as_logits(load_once(logits + at)), b = as_logits(ptx::load_readonly_v4(bias_at + at));
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                keys[j][c] = key_of(rank_of(score_of(x.x[c]), b.x[c]));
                lane_max = max(lane_max, keys[j][c]);
            }
        }
        // K keys are >= level, and fewer than K are >= beyond.
        u32 level = kth_largest<K>(lane_max, lane), beyond = ptx::warp_max(lane_max) + 1;
        while (beyond - level > 1) {
            const u32 middle = level + (beyond - level) / 2;
            const u32 reach = count_reaching(keys, middle);
            if (reach >= K) {
                level = middle;
                if (reach == K) break;
            } else {
                beyond = middle;
            }
        }
        place_exact(keys, level, K - count_reaching(keys, level + 1), scratch, lane);
        __syncwarp();
        const u32 id = ptx::load_shared_u16(scratch + Scratch::kIds + lane % K * 2);
        const f32 score = score_of(load_logit(logits + id));
        ptx::store_shared_if(lane < K, scratch + Scratch::kTerms + lane * 4,
                             __float_as_uint(weight_term(score, key_of(rank_of(score, bias_at[id])))));
    }

    static __device__ __forceinline__ u32 count_reaching(const u32 (&keys)[kGroups][4], u32 level) {
        u32 count = 0;
#pragma unroll
        for (int i = 0; i < kGroups * 4; ++i) count += keys[i / 4][i % 4] >= level ? 1 : 0;
        return ptx::warp_sum(count);
    }

    // Writes the ids of the keys above `level` and of the first `quota` keys equal to it, in ascending order.
    static __device__ __forceinline__ void place_exact(const u32 (&keys)[kGroups][4], u32 level, u32 quota, u32 scratch,
                                                       u32 lane) {
        u32 base = 0;  // experts so far: above the level in the lower half, at the level in the upper
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            u32 own = 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) own += (keys[j][c] > level ? 1u : 0u) + (keys[j][c] == level ? 0x10000u : 0u);
            const u32 sum = ptx::warp_prefix_sum(own);
            u32 before = base + sum - own;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const bool over = keys[j][c] > level, tied = keys[j][c] == level;
                const u32 ties = before >> 16, slot = (before & 0xffffu) + min(ties, quota);
                ptx::store_shared_u16_if(over || (tied && ties < quota), scratch + Scratch::kIds + slot * 2,
                                         (j * 32 + lane) * 4 + c);
                before += (over ? 1u : 0u) + (tied ? 0x10000u : 0u);
            }
            base += __shfl_sync(kFullWarp, sum, 31);
        }
    }
};

}  // namespace fused_router
