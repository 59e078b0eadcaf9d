// The packed weights, version 1, from and to checkpoints: one thread moves a lane's share of a 64 x 64 block.
#pragma once
#include "common/types.cuh"
#include "gemm/tile.cuh"
#include "ptx/memory.cuh"

namespace gemm {

// One projection of all experts. A gated one has its rows interleaved when packed: 8 gate rows, then their 8 up rows.
struct Weights {
    u32 outputs, k;
    bool gated;

    __device__ __forceinline__ u32 k_blocks() const { return k / kBlock; }
    __device__ __forceinline__ u32 strips() const { return outputs / kBlock; }

    // Row of the checkpoint that is packed as row `row`.
    __device__ __forceinline__ u32 checkpoint_row(u32 row) const {
        return gated ? row / 16 * 8 + row % 8 + row / 8 % 2 * (outputs / 2) : row;
    }
};

// A block of the packed weights: 64 rows from `row` on, 64 k from `k` on, of one expert.
struct BlockPlace {
    u64 expert, offset;  // offset in bytes from the start of all packed weights
    u32 row, k;

    // Blocks are numbered as they lie in memory, whole groups of four strips first.
    __device__ __forceinline__ BlockPlace(const Weights& weights, u64 index) {
        const u32 k_blocks = weights.k_blocks(), per_expert = weights.strips() * k_blocks;
        expert = index / per_expert;
        offset = index * kBlockBytes;
        const u32 inside = static_cast<u32>(index - expert * per_expert), group = inside / (kStrips * k_blocks);
        const u32 in_group = inside - group * kStrips * k_blocks;
        const u32 strips = smaller(weights.strips() - group * kStrips, kStrips);
        k = in_group / strips * kBlock;
        row = (group * kStrips + in_group % strips) * kBlock;
    }
};

// Four nibbles of each of the words at bits 0, 8, 16 and 24: byte `column` of a checkpoint word holds k = 2 column and
// 2 column + 1. The low nibbles go to the word's lower half, the high ones to its upper half (gemm/dequantize.cuh).
__device__ __forceinline__ u32 lane_word(u32 upper_first, u32 lower_first, u32 upper_second, u32 lower_second, u32 column) {
    const u32 shift = 8 * column;
    const u32 parts[4] = {upper_first >> shift, lower_first >> shift, upper_second >> shift, lower_second >> shift};
    u32 word = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) word |= (parts[i] & 15) << (4 * i) | (parts[i] >> 4 & 15) << (16 + 4 * i);
    return word;
}

// Codes of a checkpoint: eight to a word along K, lowest nibble first.
struct PackedCodes {
    const u32* words;  // [experts][outputs][k / 8]

    // The eight words of 64 k from `k` on.
    __device__ __forceinline__ void row_of_64(u32 (&out)[8], u64 row, u32 k, u32 row_length, bool&) const {
        const u32* from = words + row * (row_length / 8) + k / 8;
        const uint4 a = ptx::load_readonly_v4(from), b = ptx::load_readonly_v4(from + 4);
        out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    }
};

// One code an int32.
struct PlainCodes {
    const i32* codes;  // [experts][outputs][k]

    __device__ __forceinline__ void row_of_64(u32 (&out)[8], u64 row, u32 k, u32 row_length, bool& wrong) const {
        const i32* from = codes + row * row_length + k;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const uint4 a = ptx::load_readonly_v4(from + 8 * i), b = ptx::load_readonly_v4(from + 8 * i + 4);
            wrong |= ((a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) & ~15u) != 0;
            out[i] = (a.x & 15) | (a.y & 15) << 4 | (a.z & 15) << 8 | (a.w & 15) << 12 | (b.x & 15) << 16 |
                     (b.y & 15) << 20 | (b.z & 15) << 24 | (b.w & 15) << 28;
        }
    }
};

constexpr u32 kPackThreads = 128;  // one a lane of the block's four warps of 16 rows

// Packs blocks blockIdx.x, blockIdx.x + gridDim.x, ... Sets *wrong to 1 when a code lies outside 0..15.
template <class Codes>
__device__ __forceinline__ void pack(const Weights& weights, const Codes& codes, const u16* scales, u8* packed, u64 blocks,
                                     i32* wrong) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, scales_per_row = weights.k / 32;
    bool bad = false;
    for (u64 index = blockIdx.x; index < blocks; index += gridDim.x) {
        const BlockPlace place(weights, index);
        const u64 first = place.expert * weights.outputs;
        const u32 row = place.row + warp * 16 + lane / 4;
        u32 upper[8], lower[8], words[4];
        codes.row_of_64(upper, first + weights.checkpoint_row(row), place.k, weights.k, bad);
        codes.row_of_64(lower, first + weights.checkpoint_row(row + 8), place.k, weights.k, bad);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            words[i] = lane_word(upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1], lane % 4);
        }
        u8* block = packed + place.offset;
        *reinterpret_cast<uint4*>(block + threadIdx.x * 16) = make_uint4(words[0], words[1], words[2], words[3]);
        if (threadIdx.x < 64) {  // word i: group i / 32, row i % 32 / 4 (and that + 8) of the 16 rows of warp i % 4
            const u32 scale_row = place.row + threadIdx.x % 4 * 16 + threadIdx.x % 32 / 4;
            const u32 group = place.k / 32 + threadIdx.x / 32;
            const u32 low = scales[(first + weights.checkpoint_row(scale_row)) * scales_per_row + group];
            const u32 high = scales[(first + weights.checkpoint_row(scale_row + 8)) * scales_per_row + group];
            *reinterpret_cast<u32*>(block + kScaleBytes + threadIdx.x * 4) = low | high << 16;
        }
    }
    if (bad) *wrong = 1;
}

// Inverse: codes as [experts][outputs][k / 8] words, scales as [experts][outputs][k / 32].
__device__ __forceinline__ void unpack(const Weights& weights, const u8* packed, u32* codes, u16* scales, u64 blocks) {
    const u32 scales_per_row = weights.k / 32;
    for (u64 index = blockIdx.x; index < blocks; index += gridDim.x) {
        const BlockPlace place(weights, index);
        const u64 first = place.expert * weights.outputs;
        const u8* block = packed + place.offset;
        for (u32 i = threadIdx.x; i < kBlock * 8; i += kPackThreads) {  // word `column` of a row
            const u32 row = i / 8, column = i % 8, shift = row % 16 / 8 * 4 + column % 2 * 8;
            const u32* lanes = reinterpret_cast<const u32*>(block + row / 16 * 512 + row % 8 * 64) + column / 2;
            u32 word = 0;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                const u32 share = lanes[4 * c] >> shift;
                word |= (share & 15) << (8 * c) | (share >> 16 & 15) << (8 * c + 4);
            }
            codes[(first + weights.checkpoint_row(place.row + row)) * (weights.k / 8) + place.k / 8 + column] = word;
        }
        for (u32 i = threadIdx.x; i < kBlock * 2; i += kPackThreads) {
            const u32 row = i / 2, group = i % 2;
            const u8* from = block + kScaleBytes + group * 128 + row % 8 * 16 + row / 16 * 4 + row % 16 / 8 * 2;
            scales[(first + weights.checkpoint_row(place.row + row)) * scales_per_row + place.k / 32 + group] =
                *reinterpret_cast<const u16*>(from);
        }
    }
}

}  // namespace gemm
