// Ranks of a chunk's pairs for ids that may repeat in a row: each warp goes through its own contiguous pairs 32 at a time,
// and counters of the warp's own hold how many it has seen of each expert, so the order is that of the pairs.
#pragma once
#include "common/types.cuh"
#include "ptx/special.cuh"

namespace plan {

// One counter a warp and expert; kPairs of a warp must stay below 2^16.
template <int kMaxExperts, int kWarps>
struct PairRanks {
    u16 seen[kWarps][kMaxExperts];

    __device__ __forceinline__ void clear() {
        uint4* words = reinterpret_cast<uint4*>(&seen[0][0]);
        for (u32 i = threadIdx.x; i < kWarps * kMaxExperts / 8; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
    }

    // Counts one pair for the calling warp; any lanes may call, in any order.
    __device__ __forceinline__ void add(u32 expert) {
        u32* words = reinterpret_cast<u32*>(seen[threadIdx.x / kWarp]);
        atomicAdd(words + expert / 2, expert % 2 ? 0x10000u : 1u);
    }

    // Turns the counts into what the warps before have seen and returns the chunk's counts of thread t's two experts, 16
    // bits each. Barriers before and after.
    __device__ __forceinline__ u32 scan_warps() {
        u32 sum = 0;
        if (threadIdx.x < kMaxExperts / 2) {
#pragma unroll
            for (u32 w = 0; w < kWarps; ++w) {
                u32* two = reinterpret_cast<u32*>(seen[w]) + threadIdx.x;
                const u32 own = *two;
                *two = sum;
                sum += own;
            }
        }
        return sum;
    }

    // Rank of the lane's pair among the chunk's pairs of its expert. The whole warp calls, 32 consecutive pairs at a time, in
    // order; lanes whose pair has no place pass placed = false.
    __device__ __forceinline__ u32 take(u32 expert, bool placed) {
        u16* own = seen[threadIdx.x / kWarp];
        const u32 same = __match_any_sync(kFullWarp, placed ? expert : 0xffffffffu);
        const u32 among = __popc(same & ptx::lanes_below());
        const u32 before = placed ? own[expert] : 0;
        __syncwarp();
        if (placed && among == 0) own[expert] = static_cast<u16>(before + __popc(same));
        __syncwarp();
        return before + among;
    }
};

}  // namespace plan
