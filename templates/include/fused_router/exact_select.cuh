// What the selections by several warps have in common: a winner as a lane sees it, the exact selection of any row, and weights.
#pragma once
#include "common/types.cuh"
#include "fused_router/score.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace fused_router {

// One place of 32: a candidate as a lane sees it when the row is decided.
struct Settled {
    bool wins;
    u32 slot;  // among the winners, in ascending order of id
    u32 id;
    u32 term;  // weight term, as bits
};

template <i32 E>
__device__ __forceinline__ u32 count_stored(u32 keys, u32 key, u32 lane) {
    u32 reach = 0;
#pragma unroll 4
    for (u32 e = lane; e < E; e += kWarp) reach += ptx::load_shared(keys + e * 4) >= key;
    return ptx::warp_sum(reach);
}

// Any row, by one warp: finds the K-th largest key bit by bit, then takes the lowest ids among its equals. `keys`: shared
// address of E words. store(wins, place, id, key) is called by all lanes together; places ascend with the ids.
template <i32 E, i32 K, typename Logit, typename Store>
__device__ __noinline__ void select_exact(u32 keys, const Logit* row, const f32* bias, u32 lane, Store store) {
#pragma unroll 4
    for (u32 e = lane; e < E; e += kWarp)
        ptx::store_shared_if(true, keys + e * 4, key_of(rank_of(score_of(load_logit(row + e)), __ldg(bias + e))));
    u32 kth = 0;
#pragma unroll 1
    for (u32 bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (count_stored<E>(keys, kth | bit, lane) >= K) kth |= bit;
    }
    u32 equals_left = K - (kth == 0xffffffffu ? 0 : count_stored<E>(keys, kth + 1, lane));
    const u32 below = (1u << lane) - 1;
    u32 place = 0;
#pragma unroll 1
    for (u32 e = lane; e < E; e += kWarp) {
        const u32 key = ptx::load_shared(keys + e * 4);
        const u32 equal = __ballot_sync(kFullWarp, key == kth);
        const bool wins = key > kth || (key == kth && __popc(equal & below) < equals_left);
        equals_left -= smaller<u32>(equals_left, __popc(equal));
        const u32 mask = __ballot_sync(kFullWarp, wins);
        store(wins, place + __popc(mask & below), e, key);
        place += __popc(mask);
    }
    __syncwarp();
}

// The winners' weights, by one warp; each winning lane gets its own. `terms`: shared address of K words.
template <i32 K>
__device__ __forceinline__ f32 weight_through(u32 terms, const Settled& mine, i32 renormalize, f32 factor) {
    ptx::store_shared_if(mine.wins, terms + mine.slot * 4, mine.term);
    __syncwarp();
    f32 all[K];
#pragma unroll
    for (i32 i = 0; i < K; i += 4) {
        const uint4 v = ptx::load_shared_v4(terms + i * 4);
        all[i] = __uint_as_float(v.x);
        all[i + 1] = __uint_as_float(v.y);
        all[i + 2] = __uint_as_float(v.z);
        all[i + 3] = __uint_as_float(v.w);
    }
    return weight_of(__uint_as_float(mine.term), sum_terms<K>(all), renormalize, factor);
}

}  // namespace fused_router
