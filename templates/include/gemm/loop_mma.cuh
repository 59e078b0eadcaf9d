// Main loop for every architecture: mma.sync m16n8k16, weights as the 16-row operand, tokens eight at a time.
#pragma once
#include "common/types.cuh"
#include "gemm/loop.cuh"
#include "ptx/mma.cuh"
#include "ptx/matrix.cuh"

namespace gemm {

template <class T>
struct MmaLoop {
    static __device__ __forceinline__ void enter_producer() {}
    static __device__ __forceinline__ void enter_math() {}

    // acc += weights * tokens over all of K, k16 after k16. acc[4 i ..] is the fragment of token rows 8 i .. 8 i + 7.
    template <u32 kWidth>
    static __device__ __forceinline__ void run(MathWarp<T>& warp, f32 (&acc)[kWidth / 2]) {
        u32 left = warp.item_stages;
        do {
            warp.wait();
#pragma unroll
            for (u32 block = 0; block < T::stage_blocks; ++block) multiply<kWidth>(warp, acc, block);
            __syncwarp();  // every lane has read
            warp.release(warp.release_address());
            warp.advance();
        } while (--left > 0);
    }

private:
    template <u32 kWidth>
    static __device__ __forceinline__ void multiply(MathWarp<T>& warp, f32 (&acc)[kWidth / 2], u32 block) {
        const Words words(warp.weights(block), warp.warp, warp.lane);
        const u32 row = warp.lane % 8, chunk = warp.lane / 8;  // of ldmatrix: lanes 8 i .. 8 i + 7 address matrix i
        const u32 tokens = warp.tokens() + block * T::token_block_bytes + row * kTokenRowBytes;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 a0[4], a1[4];
            const Factors by(words.scale[half]);
            dequantize(a0, words.code[2 * half], by);
            dequantize(a1, words.code[2 * half + 1], by);
            const u32 address = tokens + ((4 * half + chunk) ^ row) * 16;
#pragma unroll
            for (u32 tile = 0; tile < kWidth / 8; ++tile) {
                u32 b[4];
                ptx::load_matrix_x4(b, address + tile * (8 * kTokenRowBytes));
                f32(&d)[4] = reinterpret_cast<f32(&)[4]>(acc[4 * tile]);
                ptx::mma_m16n8k16(d, a0, b[0], b[1]);
                ptx::mma_m16n8k16(d, a1, b[2], b[3]);
            }
        }
    }
};

}  // namespace gemm
