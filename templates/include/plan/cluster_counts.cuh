// The join of a plan that one cluster makes: every CTA sends its chunk's counts to all CTAs, each arriving store counting
// on the receiver's mbarrier. One trip through the cluster's shared memory, no barrier after it. An mbarrier takes a 16-byte
// store every two clocks or so, which decides how long this lasts: prefer few CTAs and narrow counts.
#pragma once
#include "common/types.cuh"
#include "plan/place.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

namespace plan {

template <int kCluster, int kMaxExperts, typename Count>
struct ClusterCounts {
    static constexpr u32 kBytes = kMaxExperts * sizeof(Count);
    static constexpr u32 kPieces = kBytes / 16;
    static_assert(kBytes % 16 == 0, "counts are sent 16 bytes at a time");

    uint4 received[kCluster][kPieces];
    uint4 own[kPieces];
    u64 bar;

    // First of all: the barrier, and the news to the cluster that it is there. Counts of `experts` experts will be sent.
    __device__ __forceinline__ void open(u32 experts) {
        const u32 at = ptx::shared_address(&bar);
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(at, 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        ptx::cluster_arrive_relaxed();
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(at, kCluster * pieces_of(experts) * 16);
    }

    // Waits until every CTA of the cluster has opened. Between open() and send().
    __device__ __forceinline__ void wait_open() { ptx::cluster_wait_acquire(); }

    // Thread t's counts of experts 2t and 2t + 1. A barrier must follow before send().
    __device__ __forceinline__ void set(u32 first, u32 second) {
        if (sizeof(Count) == 1) {
            reinterpret_cast<u16*>(own)[threadIdx.x] = static_cast<u16>(first | second << 8);
        } else {
            reinterpret_cast<u32*>(own)[threadIdx.x] = first | second << 16;
        }
    }

    // Sends `own` to all CTAs, this one included: warp w's to CTA rank + w, so that no receiver is flooded.
    __device__ __forceinline__ void send(u32 rank, u32 experts) {
        const u32 bar_at = ptx::shared_address(&bar), to = ptx::shared_address(received[rank]), pieces = pieces_of(experts);
        for (u32 turn = threadIdx.x / kWarp; turn < 2 * kCluster; turn += blockDim.x / kWarp) {
            const u32 peer = (turn / 2 + rank) % kCluster, remote = ptx::map_shared(to, peer);
            const u32 bar_of = ptx::map_shared(bar_at, peer);
            for (u32 piece = turn % 2 * kWarp + threadIdx.x % kWarp; piece < pieces; piece += 2 * kWarp) {
                ptx::store_async(remote + piece * 16, bar_of, own[piece]);
            }
        }
    }

    // Waits for all chunks, then sums thread t's two experts over all of them and over those before `rank`. The sums must
    // stay below 2^16.
    __device__ __forceinline__ void receive(u32 rank, u32 experts, TwoCounts& total, TwoCounts& before) {
        ptx::mbarrier_wait_cluster(ptx::shared_address(&bar), 0);
        u32 sum = 0, sum_before = 0;
        if (2 * threadIdx.x < experts) {
#pragma unroll
            for (u32 peer = 0; peer < kCluster; ++peer) {
                const u32 two = pair_of(peer);
                sum += two;
                sum_before += peer < rank ? two : 0;
            }
        }
        total = unpack(sum);
        before = unpack(sum_before);
    }

  private:
    static __device__ __forceinline__ u32 pieces_of(u32 experts) { return ceil_div<u32>(experts * sizeof(Count), 16); }

    __device__ __forceinline__ u32 pair_of(u32 peer) const {
        if (sizeof(Count) == 1) {
            const u32 two = reinterpret_cast<const u16*>(received[peer])[threadIdx.x];
            return (two & 0xffu) | (two & 0xff00u) << 8;
        }
        return reinterpret_cast<const u32*>(received[peer])[threadIdx.x];
    }
};

}  // namespace plan
