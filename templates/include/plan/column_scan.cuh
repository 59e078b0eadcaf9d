// The join of a plan of any size: counts [chunks][experts] become, in place, the counts of the chunks before; totals come
// out beside them. A kernel of its own between counting and placing. One CTA serves 32 experts; its 32 warps share the
// chunks in contiguous runs, so every access is a whole 128-byte line.
#pragma once
#include "common/types.cuh"
#include "ptx/memory.cuh"

namespace plan {

constexpr u32 kScanThreads = 1024;
constexpr u32 kScanExperts = 32;  // of one CTA

// `experts` is the row length of `counts`, a multiple of 32; totals has as many elements.
__device__ __forceinline__ void scan_columns(u32* counts, u32* totals, u32 chunks, u32 experts) {
    constexpr u32 kWarps = kScanThreads / 32, kDepth = 12;
    __shared__ u32 sums[kWarps][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 each = ceil_div(chunks, kWarps), first = smaller(warp * each, chunks), last = smaller(first + each, chunks);
    u32* column = counts + blockIdx.x * kScanExperts + lane;

    u32 sum = 0;
    for (u32 row = first; row < last; row += kDepth) {
        u32 value[kDepth];
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) value[i] = row + i < last ? ptx::load_l2(column + static_cast<u64>(row + i) * experts) : 0;
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) sum += value[i];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    u32 before = 0, total = 0;
#pragma unroll
    for (u32 w = 0; w < kWarps; ++w) {
        const u32 other = sums[w][lane];
        before += w < warp ? other : 0;
        total += other;
    }
    if (warp == 0) totals[blockIdx.x * kScanExperts + lane] = total;
    for (u32 row = first; row < last; row += kDepth) {
        u32 value[kDepth];
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) value[i] = row + i < last ? ptx::load_l2(column + static_cast<u64>(row + i) * experts) : 0;
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) {
            if (row + i < last) column[static_cast<u64>(row + i) * experts] = before;
            before += value[i];
        }
    }
}

}  // namespace plan
