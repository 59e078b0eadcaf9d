// Main loop for sm_90a: weights from registers, token rows from swizzled shared memory, wgmma m64 n<width> k16.
#pragma once
#include "common/types.cuh"
#include "gemm/loop.cuh"
#include "ptx/wgmma.cuh"

namespace gemm {

template <class T>
struct WgmmaLoop {
    // 640 threads enter with at most 96 registers each. Above 64 rows the producer leaves a third of its to the math warps.
    static constexpr bool kMoveRegisters = T::max_rows > 64;
    static __device__ __forceinline__ void enter_producer() {
        if constexpr (kMoveRegisters) ptx::keep_registers<64>();
    }
    static __device__ __forceinline__ void enter_math() {
        if constexpr (kMoveRegisters) ptx::take_registers<104>();
    }

    // acc += weights * tokens over all of K, k16 after k16. One k64 block is dequantised while the one before multiplies.
    // Nothing is in flight over the end of a stage: if it were, the compiler would keep the fragments of all widths apart,
    // run out of registers and serialise every wgmma (C7512).
    template <u32 kWidth>
    static __device__ __forceinline__ void run(MathWarp<T>& warp, f32 (&acc)[kWidth / 2]) {
        u32 left = warp.item_stages;
        do {
            warp.wait();
            const u64 tokens = ptx::wgmma_operand(warp.tokens());
#pragma unroll
            for (u32 block = 0; block < T::stage_blocks; ++block) {
                multiply<kWidth>(warp, acc, tokens, block);
                ptx::wgmma_wait<kInFlight>();
            }
            ptx::wgmma_wait<0>();
            warp.release(warp.release_address());
            warp.advance();
        } while (--left > 0);
    }

private:
    static constexpr int kInFlight = T::max_rows <= 80 ? 1 : 0;  // two sets of fragments do not fit beside more rows

    template <u32 kWidth>
    static __device__ __forceinline__ void multiply(MathWarp<T>& warp, f32 (&acc)[kWidth / 2], u64 tokens, u32 block) {
        const Words words(warp.weights(block), warp.warp, warp.lane);
        u32 a[4][4];
#pragma unroll
        for (u32 step = 0; step < 4; ++step) dequantize(a[step], words.code[step], words.scale[step / 2]);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < 4; ++step) {
            ptx::Wgmma<kWidth>::add(acc, a[step], tokens + (block * (kWidth * kTokenRowBytes / 16) + 2 * step));
        }
        ptx::wgmma_commit();
    }
};

}  // namespace gemm
