// The join of a plan that one cluster makes from few rows: each warp sends its row's winners to all CTAs the moment it has
// them, and every CTA counts all winners itself, warp w those of CTA w as soon as they are there. The earliest possible join,
// and for few rows the least to send.
#pragma once
#include "common/types.cuh"
#include "plan/place.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace plan {

// A row's K local ids are 16 bits each; kNowhere marks a pair without a place. kMaxRows: of the whole problem.
template <int kCluster, int kMaxExperts, int K, int kMaxRows>
struct ClusterRows {
    static constexpr u32 kNowhere = 0xffff;
    static constexpr u32 kPieces = K * 2 / 16;  // 16-byte pieces of a row
    static_assert(kPieces * kCluster == 32 || kPieces * kCluster == 16, "one lane sends one piece to one CTA");

    uint4 rows[kMaxRows][kPieces];
    u32 counts[kMaxExperts];  // all rows in the lower half, rows before the chunk in the upper
    u64 bars[kCluster];  // one a sending CTA

    // First of all; CTA c will send rows [c * each, (c + 1) * each) of the `tokens` rows. A barrier must follow.
    __device__ __forceinline__ void open(u32 tokens, u32 each) {
        const u32 at = ptx::shared_address(bars);
        if (threadIdx.x == 0) {
#pragma unroll 4
            for (u32 sender = 0; sender < kCluster; ++sender) ptx::mbarrier_init(at + sender * 8, 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        ptx::cluster_arrive_relaxed();
        if (threadIdx.x == 0) {
#pragma unroll 4
            for (u32 sender = 0; sender < kCluster; ++sender) {
                const u32 rows_of = end_of(sender, tokens, each) - first_of(sender, tokens, each);
                ptx::mbarrier_arrive_expect(at + sender * 8, rows_of * (K * 2));
            }
        }
        for (u32 i = threadIdx.x; i < kMaxExperts; i += blockDim.x) counts[i] = 0;
    }

    // Between open() and the first send_row().
    __device__ __forceinline__ void wait_open() { ptx::cluster_wait_acquire(); }

    // One warp of CTA `rank` sends row `row` (of the problem), whose ids lie at shared address `ids`, 16 bits each.
    __device__ __forceinline__ void send_row(u32 row, u32 rank, u32 ids, u32 lane) {
        const u32 peer = lane / kPieces, piece = lane % kPieces;
        if (peer < kCluster) {
            const u32 to = ptx::shared_address(&rows[row][piece]);
            ptx::store_async(ptx::map_shared(to, peer), ptx::map_shared(ptx::shared_address(&bars[rank]), peer),
                             ptx::load_shared_v4(ids + piece * 16));
        }
    }

    // Waits for all rows and counts them, for CTA `rank` those before its own rows too. Needs a warp a CTA; ends with a
    // barrier.
    __device__ __forceinline__ void receive(u32 tokens, u32 each, u32 rank, TwoCounts& total, TwoCounts& before) {
        const u32 sender = threadIdx.x / kWarp;
        if (sender < kCluster) {
            ptx::mbarrier_wait_cluster(ptx::shared_address(&bars[sender]), 0);
            const u32* words = reinterpret_cast<const u32*>(rows);
            const u32 last = end_of(sender, tokens, each) * (K / 2), step = sender < rank ? 0x10001u : 1u;
#pragma unroll 4
            for (u32 i = first_of(sender, tokens, each) * (K / 2) + threadIdx.x % kWarp; i < last; i += kWarp) {
                const u32 two = words[i];
                if ((two & 0xffffu) != kNowhere) atomicAdd(&counts[two & 0xffffu], step);
                if (two >> 16 != kNowhere) atomicAdd(&counts[two >> 16], step);
            }
        }
        __syncthreads();
        total = before = {0, 0};
        if (threadIdx.x < kMaxExperts / 2) {
            const u32 a = counts[2 * threadIdx.x], b = counts[2 * threadIdx.x + 1];
            total = {a & 0xffffu, b & 0xffffu};
            before = {a >> 16, b >> 16};
        }
    }

  private:
    static __device__ __forceinline__ u32 first_of(u32 sender, u32 tokens, u32 each) { return smaller(sender * each, tokens); }
    static __device__ __forceinline__ u32 end_of(u32 sender, u32 tokens, u32 each) { return smaller((sender + 1) * each, tokens); }
};

}  // namespace plan
