// The join of a plan that many CTAs make: a matrix [chunks][experts] of bytes in global memory, summed by clusters of 8
// CTAs. Cluster g serves the chunks 8g .. 8g + 7; its CTA q sums the columns 128q .. 128q + 127 over all chunks, and keeps
// the sums over the chunks before each of the cluster's eight; one cluster barrier later every CTA reads its 16-bit sums
// from its neighbours. So a cluster reads the matrix once.
#pragma once
#include "common/types.cuh"
#include "plan/place.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

namespace plan {

constexpr u32 kSumCluster = 8;

template <int kExperts, int kThreads>
struct ChunkCounts {
    static constexpr u32 kSlices = kExperts / 128;
    static constexpr u32 kWarps = kThreads / 32;
    static_assert(kExperts % 128 == 0 && kSlices <= kSumCluster, "a CTA sums 128 experts");
    static_assert(kThreads >= 32 * (kSumCluster + 1), "a warp for each chunk's sums and one for the totals");

    u32 group[kSumCluster][32];    // the own cluster's rows of the matrix: 4 experts a word
    u32 sums[4][32];               // before the cluster: even, odd experts of a word; in all: the same
    uint2 packed[kSumCluster + 1][32];  // before each of the eight chunks, then in all; experts in order, 16 bits each

    __device__ __forceinline__ void clear() {
        if (threadIdx.x < 128) (&sums[0][0])[threadIdx.x] = 0;
    }

    // Sums this CTA's slice of `matrix`. clear() and a barrier must have gone before; a cluster barrier must follow.
    __device__ __forceinline__ void sum_slice(const u8* matrix, u32 chunks, u32 rank, u32 first_of_cluster) {
        if (rank >= kSlices) return;  // the whole CTA
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u8* column = matrix + rank * 128 + lane * 4;
        u32 before_even = 0, before_odd = 0, even = 0, odd = 0;
#pragma unroll 1
        for (u32 start = warp; start < chunks; start += kWarps * kDepth) {
            u32 word[kDepth];
#pragma unroll
            for (u32 i = 0; i < kDepth; ++i) {
                const u32 row = start + i * kWarps;
                word[i] = row < chunks ? ptx::load_l2(column + static_cast<u64>(row) * kExperts) : 0;
            }
#pragma unroll
            for (u32 i = 0; i < kDepth; ++i) {
                const u32 row = start + i * kWarps, e = word[i] & 0x00ff00ffu, o = (word[i] >> 8) & 0x00ff00ffu;
                even += e;
                odd += o;
                if (row < first_of_cluster) {
                    before_even += e;
                    before_odd += o;
                } else if (row < first_of_cluster + kSumCluster) {
                    group[row - first_of_cluster][lane] = word[i];
                }
            }
        }
        atomicAdd(&sums[0][lane], before_even);
        atomicAdd(&sums[1][lane], before_odd);
        atomicAdd(&sums[2][lane], even);
        atomicAdd(&sums[3][lane], odd);
        __syncthreads();
        if (warp <= kSumCluster) pack(warp, lane, chunks - first_of_cluster);
    }

    // After the cluster barrier: thread t's experts 2t and 2t + 1, in all and before chunk first_of_cluster + rank.
    __device__ __forceinline__ void read(u32 rank, TwoCounts& total, TwoCounts& before) const {
        u32 sum = 0, sum_before = 0;
        if (threadIdx.x < kExperts / 2) {
            const u32 slice = threadIdx.x / 64, word = threadIdx.x % 64;
            sum = ptx::load_cluster(ptx::map_shared(ptx::shared_address(packed[kSumCluster]) + word * 4, slice));
            sum_before = ptx::load_cluster(ptx::map_shared(ptx::shared_address(packed[rank]) + word * 4, slice));
        }
        total = unpack(sum);
        before = unpack(sum_before);
    }

  private:
    static constexpr u32 kDepth = 9;  // 16 warps have 144 rows in flight

    // Warp i < 8: the sums before the cluster's chunk i; warp 8: the totals. `present`: chunks from the cluster's first on.
    __device__ __forceinline__ void pack(u32 warp, u32 lane, u32 present) {
        const bool all = warp == kSumCluster;
        u32 even = sums[all ? 2 : 0][lane], odd = sums[all ? 3 : 1][lane];
        if (!all) {
#pragma unroll
            for (u32 i = 0; i + 1 < kSumCluster; ++i) {
                const u32 word = i < warp && i < present ? group[i][lane] : 0;
                even += word & 0x00ff00ffu;
                odd += (word >> 8) & 0x00ff00ffu;
            }
        }
        packed[warp][lane] = make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
    }
};

}  // namespace plan
