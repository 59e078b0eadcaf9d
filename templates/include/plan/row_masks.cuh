// Which rows of a chunk chose an expert, one bit a row: gives an expert's count, and a pair's rank among the chunk's pairs
// of that expert, in row order and without any order among the threads. A row must not name an expert twice.
#pragma once
#include "common/types.cuh"

namespace plan {

template <int kMaxExperts, int kPlanes>
struct RowMasks {
    static constexpr u32 kRows = kPlanes * 32;
    u32 bits[kPlanes][kMaxExperts];

    __device__ __forceinline__ void clear() {
        uint4* words = reinterpret_cast<uint4*>(&bits[0][0]);
        for (u32 i = threadIdx.x; i < kPlanes * kMaxExperts / 4; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void add(u32 row, u32 expert) {
        atomicOr(&bits[kPlanes == 1 ? 0 : row / 32][expert], 1u << (row % 32));
    }

    __device__ __forceinline__ u32 count(u32 expert) const {
        u32 sum = 0;
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) sum += __popc(bits[p][expert]);
        return sum;
    }

    __device__ __forceinline__ u32 rank(u32 row, u32 expert) const {
        const u32 plane = kPlanes == 1 ? 0 : row / 32;
        u32 sum = __popc(bits[plane][expert] & ((1u << (row % 32)) - 1));
#pragma unroll
        for (int p = 0; p + 1 < kPlanes; ++p) {
            if (p < static_cast<int>(plane)) sum += __popc(bits[p][expert]);
        }
        return sum;
    }
};

}  // namespace plan
