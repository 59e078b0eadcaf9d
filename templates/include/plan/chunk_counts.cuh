// The join of a plan that many CTAs make: a matrix [chunks][experts] of bytes in global memory, summed by clusters of 8
// CTAs. Cluster g serves the chunks 8g .. 8g + 7; its CTA q sums the columns 128q .. 128q + 127 over all chunks and sends
// each of the eight its own sums: over all chunks, and over those before its chunk. So a cluster reads the matrix once, and
// the sums make one trip through the cluster's shared memory, counted in by the receiver's mbarrier.
#pragma once
#include "common/types.cuh"
#include "plan/place.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"

namespace plan {

constexpr u32 kSumCluster = 8;

template <int kExperts, int kThreads>
struct ChunkCounts {
    static constexpr u32 kSlices = kExperts / 128;
    static constexpr u32 kWarps = kThreads / 32;
    static constexpr u32 kDepth = 9;  // rows of a warp, all loaded at once
    static constexpr u32 kMaxChunks = kWarps * kDepth;
    static_assert(kExperts % 128 == 0 && kSlices <= kSumCluster, "a CTA sums 128 experts");
    static_assert(kWarps >= kSumCluster, "a warp sends to each CTA of the cluster");

    uint4 before[kExperts / 8];     // received: 16 bits an expert, chunks before the own one
    uint4 total[kExperts / 8];      // received: all chunks
    u32 group[kSumCluster][32];     // the own cluster's rows of the matrix: 4 experts a word
    u32 sums[4][32];                // before the cluster: even, odd experts of a word; in all: the same
    u64 bar;

    // First of all: the barrier, zeros, and the news to the cluster. A barrier must follow.
    __device__ __forceinline__ void open() {
        const u32 at = ptx::shared_address(&bar);
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(at, 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        ptx::cluster_arrive_relaxed();
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(at, sizeof(before) + sizeof(total));
        if (threadIdx.x < 128) (&sums[0][0])[threadIdx.x] = 0;
    }

    // This thread's words of the slice of CTA `rank`: rows warp, warp + kWarps, ...
    struct Words {
        u32 word[kDepth];
    };

    __device__ __forceinline__ Words fetch(const u8* matrix, u32 chunks, u32 rank) const {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u8* column = matrix + smaller(rank, kSlices - 1) * 128 + lane * 4;
        Words words;
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) {  // no load is left out, so that nothing stands between them; see add()
            words.word[i] = ptx::load_l2(column + smaller(warp + i * kWarps, chunks - 1) * kExperts);
        }
        return words;
    }

    // Adds up what fetch() brought and sends the sums. All CTAs of the cluster call.
    __device__ __forceinline__ void send(const Words& words, u32 chunks, u32 rank, u32 first_of_cluster) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (rank < kSlices) {
            add(words, lane, warp, chunks, first_of_cluster);
            __syncthreads();
        }
        ptx::cluster_wait_acquire();  // all have opened
        if (rank < kSlices && warp < kSumCluster) send_sums(lane, warp, rank);
    }

    // Waits for the sums: thread t's experts 2t and 2t + 1.
    __device__ __forceinline__ void receive(TwoCounts& all, TwoCounts& mine) const {
        ptx::mbarrier_wait_cluster(ptx::shared_address(&bar), 0);
        const bool any = threadIdx.x < kExperts / 2;
        all = unpack(any ? reinterpret_cast<const u32*>(total)[threadIdx.x] : 0);
        mine = unpack(any ? reinterpret_cast<const u32*>(before)[threadIdx.x] : 0);
    }

  private:
    __device__ __forceinline__ void add(const Words& words, u32 lane, u32 warp, u32 chunks, u32 first_of_cluster) {
        const u32 group_at = ptx::shared_address(&group[0][lane]);
        u32 before_even = 0, before_odd = 0, even = 0, odd = 0;
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) {
            const u32 row = warp + i * kWarps, in_group = row - first_of_cluster;  // wraps for rows before the cluster
            const u32 word = row < chunks ? words.word[i] : 0;
            const u32 e = word & 0x00ff00ffu, o = (word >> 8) & 0x00ff00ffu;
            even += e;
            odd += o;
            before_even += row < first_of_cluster ? e : 0;
            before_odd += row < first_of_cluster ? o : 0;
            ptx::store_shared_if(in_group < kSumCluster, group_at + in_group * 128, word);
        }
        atomicAdd(&sums[0][lane], before_even);
        atomicAdd(&sums[1][lane], before_odd);
        atomicAdd(&sums[2][lane], even);
        atomicAdd(&sums[3][lane], odd);
    }

    // Warp p sends CTA p its sums; a lane has 4 experts of each kind, and after an exchange 8 of one kind, 16 bytes.
    __device__ __forceinline__ void send_sums(u32 lane, u32 peer, u32 rank) {
        u32 even = sums[0][lane], odd = sums[1][lane];
#pragma unroll
        for (u32 i = 0; i + 1 < kSumCluster; ++i) {
            const u32 word = i < peer ? group[i][lane] : 0;
            even += word & 0x00ff00ffu;
            odd += (word >> 8) & 0x00ff00ffu;
        }
        const uint2 own = in_order(even, odd), all = in_order(sums[2][lane], sums[3][lane]);
        const bool upper = lane % 2;
        const u32 x = __shfl_xor_sync(kFullWarp, upper ? own.x : all.x, 1);
        const u32 y = __shfl_xor_sync(kFullWarp, upper ? own.y : all.y, 1);
        const uint4 piece = upper ? make_uint4(x, y, all.x, all.y) : make_uint4(own.x, own.y, x, y);
        const u32 to = ptx::shared_address(upper ? total : before) + (rank * 16 + lane / 2) * 16;
        ptx::store_async(ptx::map_shared(to, peer), ptx::map_shared(ptx::shared_address(&bar), peer), piece);
    }

    // Sums of a word's experts 0, 2 and 1, 3 as 16-bit halves in the experts' order.
    static __device__ __forceinline__ uint2 in_order(u32 even, u32 odd) {
        return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
    }
};

}  // namespace plan
