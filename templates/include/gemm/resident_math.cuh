// The math warps of a resident program: a warpgroup takes every kGroups-th strip, multiplies it by the row tile over all of K and
// leaves it, rounded and transposed, to the warps that store.
#pragma once
#include "common/types.cuh"
#include "gemm/dequantize.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/problem.cuh"
#include "gemm/resident_tile.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_first.cuh"
#include "ptx/wgmma_wide.cuh"

namespace gemm {

// State of a math warp: the ring's place of its warpgroup's next strip.
template <class T>
struct StripWarp {
    const ResidentLayout<T> layout;
    u32 shared, group, warp, lane;
    u32 index, parity, staged_parity;

    __device__ __forceinline__ StripWarp(u32 k_blocks, u32 shared_)
        : layout(k_blocks), shared(shared_), lane(threadIdx.x % 32), parity(0), staged_parity(1) {
        const u32 id = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
        group = id / 4, warp = id % 4;
        index = group;
    }
    __device__ __forceinline__ u32 stage() const { return shared + layout.ring + index * layout.stage_bytes; }
    __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(shared + T::full + 8 * index, parity); }
    __device__ __forceinline__ void release() const { arrive(shared + T::empty + 8 * index); }
    __device__ __forceinline__ void arrive(u32 bar) const {
        __syncwarp();  // every lane has done what the others are told
        if (lane == 0) ptx::mbarrier_arrive(bar);
    }
    __device__ __forceinline__ void advance() {
        index += T::groups;
        if (index >= layout.stages) {
            index -= layout.stages;
            parity ^= 1;
        }
    }
};

// acc (+)= weights * tokens over kBlocks k64 blocks, k16 after k16. One block is dequantised while kInFlight before it multiply.
// kAhead: its words are loaded while the block before is dequantised, for which wide tiles have no registers.
template <u32 kWidth, u32 kBlocks, bool kFirst, int kInFlight, bool kAhead = false>
__device__ __forceinline__ void multiply_blocks(f32 (&acc)[kWidth / 2], u32 stage, u64 tokens, u32 warp, u32 lane) {
    Words words(stage, warp, lane);
#pragma unroll
    for (u32 block = 0; block < kBlocks; ++block) {
        u32 a[4][4];
        if constexpr (kAhead) {
            const Words these = words;
            if (block + 1 < kBlocks) words.load(stage + (block + 1) * kBlockBytes, warp, lane);
            dequantize(a, these);
        } else {
            if (block > 0) words.load(stage + block * kBlockBytes, warp, lane);
            dequantize(a, words);
        }
        const u64 operand = tokens + block * (kWidth * kTokenRowBytes / 16);
        ptx::wgmma_fence();
        if constexpr (kFirst) {
            if (block == 0) {
                ptx::WgmmaFirst<kWidth>::multiply(acc, a[0], operand);
            } else {
                ptx::Wgmma<kWidth>::add(acc, a[0], operand);
            }
        } else {
            ptx::Wgmma<kWidth>::add(acc, a[0], operand);
        }
#pragma unroll
        for (u32 step = 1; step < 4; ++step) ptx::Wgmma<kWidth>::add(acc, a[step], operand + 2 * step);
        ptx::wgmma_commit();
        ptx::wgmma_wait<kInFlight>();
    }
}

// Nothing is in flight where the number of blocks decides what comes next (C7512, see loop_wgmma.cuh).
template <class T, u32 kWidth>
__device__ __forceinline__ void multiply_strip(StripWarp<T>& warp, f32 (&acc)[kWidth / 2], u32 tile) {
    const u32 stage = warp.stage(), blocks = warp.layout.blocks;
    const u64 tokens = ptx::wgmma_operand(ptx::opaque(tile));  // its 16 sums are not worth keeping from strip to strip
    constexpr int kInFlight = kWidth / 2 + 60 <= T::math_registers ? 1 : 0;  // two sets of fragments need room
    constexpr bool kAhead = kWidth / 2 + 80 <= T::math_registers;
    if (blocks == 4) {
        multiply_blocks<kWidth, 4, true, kInFlight, kAhead>(acc, stage, tokens, warp.warp, warp.lane);
        warp.release();
        ptx::wgmma_wait<0>();
        return;
    }
    if constexpr (kWidth <= 32) {  // wider ones take their time to multiply
        if (blocks == 3) {
            multiply_blocks<kWidth, 3, true, kInFlight>(acc, stage, tokens, warp.warp, warp.lane);
            warp.release();
            ptx::wgmma_wait<0>();
            return;
        }
    }
    multiply_blocks<kWidth, 1, true, 0>(acc, stage, tokens, warp.warp, warp.lane);
    for (u32 block = 1; block < blocks; ++block) {
        const u64 operand = tokens + block * (kWidth * kTokenRowBytes / 16);
        multiply_blocks<kWidth, 1, false, 0>(acc, stage + block * kBlockBytes, operand, warp.warp, warp.lane);
    }
    warp.release();
}

// Factor, one rounding to bfloat16, and the strip as [row][64 outputs] in the warpgroup's staging tile. Accumulator layout:
// ptx/wgmma.cuh. `slot`: where the factors are, 0 for none.
template <class T, u32 kWidth>
__device__ __forceinline__ void stage_outputs(f32 (&acc)[kWidth / 2], u32 staging, u32 slot, u32 warp, u32 lane) {
    if (slot != 0) {
#pragma unroll
        for (u32 i = 0; i < kWidth / 8; ++i) {
            const float2 f = row_factors<T>(slot, i);
            acc[4 * i] *= f.x, acc[4 * i + 1] *= f.y, acc[4 * i + 2] *= f.x, acc[4 * i + 3] *= f.y;
        }
    }
    const auto output_pair = [&](u32 i) { return ptx::mul_bf16x2(ptx::pack_bf16(acc[i], acc[i + 1]), kUnitPair); };
    // stmatrix: lanes 8 i .. 8 i + 7 address the rows of matrix i: tokens 0-7 x outputs 0-7, 0-7 x 8-15, then tokens 8-15.
    const u32 write = staging + (lane % 8 + lane / 16 * 8) * T::staging_pitch + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (u32 part = 0; part < kWidth; part += 16) {
        const u32 i = part / 2;  // first accumulator of the part
        const u32 a = output_pair(i), b = output_pair(i + 2);
        if (part + 8 < kWidth) {
            const u32 c = output_pair(i + 4), d = output_pair(i + 6);
            ptx::store_matrix_x4_transposed(write + part * T::staging_pitch, a, b, c, d);
        } else {
            ptx::store_matrix_x2_transposed(write + part * T::staging_pitch, a, b);
        }
    }
}

// The same for gate and up rows, as [row][32 outputs]: see store_swiglu. Up to 64 rows, 8 beyond the width may be written.
template <class T, u32 kWidth>
__device__ __forceinline__ void stage_swiglu(f32 (&acc)[kWidth / 2], u32 staging, u32 slot, u32 warp, u32 lane) {
    const u32 write = staging + lane * T::staging_pitch + warp * 16;  // lanes 8 i .. 8 i + 7: the rows of matrix i
#pragma unroll
    for (u32 part = 0; part < kWidth / 8; part += 4) {
        u32 packed[4] = {};  // 8 token rows x 8 outputs each
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 fragment = part + i;
            if (8 * fragment >= kWidth) continue;
            f32* const d = acc + 4 * fragment;
            f32 even = swiglu(d[0] * kUnit, d[2] * kUnit), odd = swiglu(d[1] * kUnit, d[3] * kUnit);
            if (slot != 0) {
                const float2 f = row_factors<T>(slot, fragment);
                even *= f.x, odd *= f.y;
            }
            packed[i] = ptx::pack_bf16(even, odd);
        }
        if (8 * part + 16 < kWidth) {
            ptx::store_matrix_x4_transposed(write + 8 * part * T::staging_pitch, packed[0], packed[1], packed[2], packed[3]);
        } else {
            ptx::store_matrix_x2_transposed(write + 8 * part * T::staging_pitch, packed[0], packed[1]);
        }
    }
}

// This warpgroup's strips of an item, from strip `next` on; returns the first one beyond the item, counted from its end. The
// widths are instructions, so each has its own loop and accumulators.
template <class T, u32 kWidth = 8>
__device__ __forceinline__ u32 multiply_part(StripWarp<T>& warp, uint4 header, u32 next, u32 tile, u32 slot, bool swiglu) {
    if (header.x == kWidth) {
        const u32 staging = warp.shared + T::staging + warp.group * T::staging_bytes;
        const u32 full = warp.shared + T::staged_full + 8 * warp.group, empty = warp.shared + T::staged_empty + 8 * warp.group;
        for (; next < header.y; next += T::groups) {
            f32 acc[kWidth / 2];
            warp.wait();
            multiply_strip<T, kWidth>(warp, acc, tile);
            warp.advance();
            ptx::mbarrier_wait(empty, warp.staged_parity);  // the strip before has been read
            warp.staged_parity ^= 1;
            if (swiglu) {
                stage_swiglu<T, kWidth>(acc, staging, slot, warp.warp, warp.lane);
            } else {
                stage_outputs<T, kWidth>(acc, staging, slot, warp.warp, warp.lane);
            }
            warp.arrive(full);
        }
        return next - header.y;
    }
    if constexpr (kWidth < T::max_rows) {
        return multiply_part<T, next_resident_width(kWidth)>(warp, header, next, tile, slot, swiglu);
    }
    return next;
}

template <class T>
__device__ __forceinline__ void multiply_parts(const Problem& problem, u32 shared) {
    StripWarp<T> warp(problem.k_blocks(), shared);
    RingPosition slot, buffer;
    u32 next = warp.group;
    while (true) {
        const u32 place = shared + T::slot_base + slot.index * T::slot_bytes;
        ptx::mbarrier_wait(shared + T::item_full + 8 * slot.index, slot.parity);
        const uint4 header = ptx::load_shared_v4(place);  // width, strips, first output, the tile's address and rows
        if (header.x == 0) break;
        const u32 tile = header.w / kTileAlignment * kTileAlignment;
        const u32 factors = problem.row_weight != nullptr ? place : 0;
        next = multiply_part<T>(warp, header, next, tile, factors, problem.swiglu());
        ptx::mbarrier_arrive(shared + T::tokens_empty + 8 * buffer.index);
        ptx::mbarrier_arrive(shared + T::item_empty + 8 * slot.index);
        slot.template next<T::slots>();
        buffer.template next<T::buffers>();
    }
}

}  // namespace gemm
