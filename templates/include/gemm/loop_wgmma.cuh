// Main loop for sm_90a: weights from registers, token rows from swizzled shared memory, wgmma m64 n<width> k16.
#pragma once
#include "common/types.cuh"
#include "gemm/loop.cuh"
#include "ptx/wgmma.cuh"

namespace gemm {

template <class T>
struct WgmmaLoop {
    // 640 threads enter with at most 96 registers each. Above 40 rows the producer leaves a third of its to the math warps.
    static constexpr bool kMoveRegisters = T::max_rows > 40;
    static __device__ __forceinline__ void enter_producer() {
        if constexpr (kMoveRegisters) ptx::keep_registers<64>();
    }
    static __device__ __forceinline__ void enter_math() {
        if constexpr (kMoveRegisters) ptx::take_registers<104>();
    }

    // acc += weights * tokens over all of K, k16 after k16. One batch of k16 steps is dequantised while the one before
    // multiplies, over the borders of stages too: what is carried over them are finished fragments, not a multiplication
    // in flight. Were one in flight, the compiler would keep the fragments of all widths apart, run out of registers and
    // serialise every wgmma (C7512).
    template <u32 kWidth>
    static __device__ __forceinline__ void run(MathWarp<T>& warp, f32 (&acc)[kWidth / 2]) {
        constexpr u32 kSteps = steps_beside(kWidth), kBatches = T::stage_blocks * 4 / kSteps;
        static_assert(kBatches % 2 == 0, "the two sets of fragments take turns");
        Fragments<kSteps> a[2];
        warp.wait_for_operand();
        Words words(warp.weights(0), warp.warp, warp.lane);
        dequantize_batch(a[0], words, 0);
        u32 left = warp.item_stages;
        do {
            const u64 tokens = ptx::wgmma_operand(warp.tokens());
            const u32 release = warp.release_address();
#pragma unroll
            for (u32 batch = 0; batch + 1 < kBatches; ++batch) {
                const u32 next = (batch + 1) * kSteps;
                if (next % 4 == 0) words.load(warp.weights(next / 4), warp.warp, warp.lane);
                multiply<kWidth>(acc, a[batch % 2], tokens, batch * kSteps);
                if (batch > 0) ptx::wgmma_wait<1>();  // the other fragments have been read
                dequantize_batch(a[(batch + 1) % 2], words, next % 4);
            }
            multiply<kWidth>(acc, a[1], tokens, (kBatches - 1) * kSteps);
            warp.advance();
            if (left > 1) {
                warp.wait_for_operand();
                words.load(warp.weights(0), warp.warp, warp.lane);
                ptx::wgmma_wait<1>();
                dequantize_batch(a[0], words, 0);
            }
            ptx::wgmma_wait<0>();
            warp.release(release);
        } while (--left > 0);
    }

private:
    // k16 steps of a batch: as many as two sets of fragments find room for beside the accumulators. Narrow widths of a tall
    // tile could take four, but the program's registers are spread over all widths: some would spill. A program of several
    // tiles has fewer to spare.
    static constexpr u32 kTwoSteps = T::chooses ? 112 : 120;
    static constexpr u32 steps_beside(u32 width) { return T::max_rows <= 88 ? 4 : width <= kTwoSteps ? 2 : 1; }

    template <u32 kSteps>
    struct Fragments {
        u32 a[kSteps][4];
    };

    template <u32 kSteps>
    static __device__ __forceinline__ void dequantize_batch(Fragments<kSteps>& to, const Words& words, u32 first) {
#pragma unroll
        for (u32 step = 0; step < kSteps; ++step) {
            dequantize(to.a[step], words.code[first + step], Factors(words.scale[(first + step) / 2]));
        }
    }

    template <u32 kWidth, u32 kSteps>
    static __device__ __forceinline__ void multiply(f32 (&acc)[kWidth / 2], const Fragments<kSteps>& from, u64 tokens,
                                                    u32 first) {
        ptx::wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < kSteps; ++step) {
            const u32 k16 = first + step;
            const u64 operand = tokens + (k16 / 4 * (T::token_block_bytes / 16) + k16 % 4 * 2);
            ptx::Wgmma<kWidth>::add(acc, from.a[step], operand);
        }
        ptx::wgmma_commit();
    }
};

}  // namespace gemm
